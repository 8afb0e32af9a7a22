"""The directory that ``zmqgrad run --replace-torch-rpc`` puts first on PYTHONPATH. See ``sitecustomize``."""
