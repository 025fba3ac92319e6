"""MLCommons' KV-cache benchmark, as it is, on its own storage tier and on kvio's backends."""
