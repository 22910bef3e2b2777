"""From words to checked settings: keys, profiles of sites, env files, help. Never torch; `run` and all rooms above it import it."""
