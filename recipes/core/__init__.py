"""Everything that is hard about running a recipe on a cluster, the same for all recipes. docs/architecture.md shows the rooms."""
