"""The contract of a backend as tests, for kvio's own backends and for others.

``suite.BackendTests`` states what every backend promises, ``stateful.BackendMachine`` plays it
against a dictionary, ``fakes`` has backends that fail, wait or hide their batches on purpose, and
``plugin`` is loaded by pytest wherever kvio is installed. A backend of your own::

    from kvio.testing.suite import BackendTests

    class TestMine(BackendTests):
        def open(self, tmp_path):
            return kvio.open_store(f"mine://{tmp_path}")
"""
