"""The connector for MLCommons' KV-cache benchmark."""
