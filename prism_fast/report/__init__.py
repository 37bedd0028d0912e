"""Shows what is in the JSON files a run wrote. Imports only the protocol: what is not in a file is not shown."""
