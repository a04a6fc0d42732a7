"""The command `mlxcel-paged`: one file per subcommand."""
