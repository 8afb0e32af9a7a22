"""The path of ``torch.distributed.nn.api``, whose documented module is ``remote_module``."""
