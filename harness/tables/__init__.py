"""The tables, one file each: a caption, and which columns over which rows."""
