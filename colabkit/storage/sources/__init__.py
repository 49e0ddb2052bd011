"""Where data comes from: folders, archives, tables, buckets and records as listings of items that can be read."""
