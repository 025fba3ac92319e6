"""Five S3 libraries: through kvio, called directly, with their defaults; and a raw client.

`scenario` runs the loads of `plan`, each in a `client` process that calls one of the `libraries`;
`dlio` lets DLIO generate the same objects; `presenting` makes tables and plots.
"""
