"""The machine: configuration -> cases -> launch -> worker -> record -> tables and figures."""
