"""The only place that speaks to a database driver. `database` opens it; nothing else may."""
