"""The whole contract where kernel, file system or privileges lack what kvio likes best."""
