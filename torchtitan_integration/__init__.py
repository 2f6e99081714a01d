"""megamoe inside torchtitan: a train spec, a TOML table, a launcher."""
