"""Everything that talks to the server: the only place that imports redis."""
