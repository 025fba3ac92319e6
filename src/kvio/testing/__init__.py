"""The contract as tests: for kvio's own backends and for anybody's."""
