"""`fetch()` downloads a file or folder from Google Drive, an https address or any fsspec URL."""
