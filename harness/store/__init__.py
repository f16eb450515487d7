"""Results folders: records, finished rounds, and the plan of each sweep."""
