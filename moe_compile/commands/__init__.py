"""The subcommands of `megamoe` but train."""
