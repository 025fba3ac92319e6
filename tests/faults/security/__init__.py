"""Nothing that others choose — names, bytes, links, modes — makes kvio reach beyond its root."""
