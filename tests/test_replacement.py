"""``zmqgrad.install``: what it replaces, restores, refuses and warns about."""

from __future__ import annotations

import pytest

from tests.support.interpreter import Ended, run_forks, run_python

pytestmark = pytest.mark.slow  # they import torch

SETUP = """
import os, pickle, sys, warnings
warnings.filterwarnings("ignore", module="torch")
warnings.filterwarnings("ignore", category=DeprecationWarning)
warnings.filterwarnings("ignore", category=FutureWarning)
import sympy, torch  # which torch.distributed.nn imports, and takes most of its time
"""

REPLACED = """
import zmqgrad.autograd, zmqgrad.nn, zmqgrad.optim, zmqgrad.rpc
import torch.distributed.rpc as rpc
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc as same
from torch.distributed.rpc import RRef, api, internal
from torch.distributed.rpc.api import rpc_sync
from torch.distributed.rpc.backend_registry import BackendType
import torch.distributed.rpc.internal as internal_too
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.optim.optimizer import DistributedOptimizer as same_optimizer
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.nn import RemoteModule
from torch.distributed.nn.api.remote_module import RemoteModule as same_module, _RemoteModule as base
from torch._C._distributed_rpc import PyRRef, WorkerInfo

assert rpc is same is torch.distributed.rpc is zmqgrad.rpc and api is zmqgrad.rpc.api
assert dist_autograd is torch.distributed.autograd is zmqgrad.autograd
assert RRef is PyRRef is zmqgrad.rpc.RRef and rpc_sync is zmqgrad.rpc.rpc_sync
assert WorkerInfo is zmqgrad.rpc.WorkerInfo and BackendType is zmqgrad.rpc.BackendType
assert internal is internal_too
assert DistributedOptimizer is same_optimizer is zmqgrad.optim.DistributedOptimizer
assert RemoteModule is same_module is base is torch.distributed.nn.RemoteModule is zmqgrad.nn.RemoteModule
assert torch.nn.parallel.distributed.RRef is RRef
"""


PROGRAMS = {
    "every way to import torch's names leads to ours": f"""
import zmqgrad
zmqgrad.install()
zmqgrad.install()
{REPLACED}
""",
    "also after its own were imported": f"""
import torch.distributed.optim, torch.distributed.nn
import zmqgrad
zmqgrad.install()
{REPLACED}
""",
    "isinstance, pickles and wait_all behave as with torch's RPC": """
import threading
old = pickle.dumps(torch._C._distributed_rpc.WorkerInfo)

def finish_later():
    finish.wait(60)

def fail():
    raise ValueError("fail")

import zmqgrad
zmqgrad.install()
assert pickle.loads(old) is zmqgrad.rpc.WorkerInfo
import torch.distributed.rpc as rpc
rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
    init_method=f"file://{os.getcwd()}/store"))
rref = rpc.remote("a", torch.add, (torch.ones(2), 1))
assert isinstance(rref, torch._C._distributed_rpc.PyRRef) and isinstance(rref, rpc.RRef)
assert isinstance(rref.owner(), torch._C._distributed_rpc.WorkerInfo)
assert pickle.loads(pickle.dumps(rref.owner())) == rref.owner()
try:
    zmqgrad.uninstall()
    raise SystemExit("uninstalled under a running group")
except zmqgrad.errors.RpcError as error:
    assert "shutdown" in str(error)
del rref
finish = threading.Event()
slow, bad = rpc.rpc_async("a", finish_later), rpc.rpc_async("a", fail)
try:
    torch.futures.wait_all([slow, bad])
    raise SystemExit("wait_all returned")
except ValueError:
    assert not slow.done()
finish.set()
slow.wait()
rpc.shutdown()
zmqgrad.uninstall()
""",
    "uninstall restores everything": """
import torch.distributed.rpc

def state():
    of_torch = [(n, m) for n, m in sys.modules.items() if n.split(".")[0] == "torch"]
    return {(n, a): v for n, m in of_torch for a, v in vars(m).copy().items() if a != "__warningregistry__"}

import torch.distributed.optim, torch.distributed.nn
names = ["torch.distributed.rpc", "torch.distributed.rpc.api", "torch.distributed.autograd"]
before, modules, finders = state(), [sys.modules[n] for n in names], list(sys.meta_path)
import zmqgrad
zmqgrad.uninstall()
zmqgrad.install()
assert [sys.modules[n] for n in names] != modules
zmqgrad.uninstall()
zmqgrad.uninstall()
assert [sys.modules[n] for n in names] == modules and sys.meta_path == finders
after = state()
changed = [key for key, value in before.items() if after.get(key, key) is not value]
assert not changed, changed
""",
    "what torch imported meanwhile is restored, too": """
import zmqgrad
zmqgrad.install()
import torch.distributed.optim, torch.distributed.nn
zmqgrad.uninstall()
for module in [m for n, m in sys.modules.items() if n.split(".")[0] == "torch"]:
    for name, value in list(vars(module).items()):
        assert not str(getattr(value, "__module__", "")).startswith("zmqgrad"), (module, name)
from torch.distributed.optim import DistributedOptimizer
assert DistributedOptimizer.__module__ == "torch.distributed.optim.optimizer"
assert torch.distributed.optim.optimizer.rpc is sys.modules["torch.distributed.rpc"]
""",
    "modules that imported torch's names before are named in one warning": """
import types
import torch.distributed.rpc
library = sys.modules["library.workers"] = types.ModuleType("library.workers")
library.RRef, library.call, library.two = torch.distributed.rpc.RRef, torch.distributed.rpc.rpc_sync, 2
import zmqgrad
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", RuntimeWarning)
    zmqgrad.install()
    zmqgrad.install()
(told,) = (str(w.message) for w in caught if w.category is RuntimeWarning)
assert "library.workers (RRef, call)" in told
""",
    "a module that was imported before works and is restored": """
import torch.distributed.autograd as before_autograd
import torch.distributed.rpc as before
theirs = before.init_rpc, before.TensorPipeRpcBackendOptions, before.functions.async_execution
import zmqgrad, zmqgrad.rpc
zmqgrad.install()
options = before.TensorPipeRpcBackendOptions(init_method="file:///tmp/never_opened")
assert isinstance(options, zmqgrad.rpc.RpcBackendOptions)
assert before.init_rpc is zmqgrad.rpc.init_rpc
assert before.functions.async_execution is zmqgrad.rpc.functions.async_execution
assert before_autograd.backward is zmqgrad.autograd.backward
zmqgrad.uninstall()
assert theirs == (before.init_rpc, before.TensorPipeRpcBackendOptions, before.functions.async_execution)
""",
    "torch's own RPC must not be running": """
import tempfile
import torch.distributed.rpc as theirs
import zmqgrad

def refused():
    try:
        zmqgrad.install()
    except zmqgrad.errors.RpcError as error:
        return "shutdown" in str(error) and "forked" in str(error)
    return False

with tempfile.TemporaryDirectory() as folder:
    theirs.init_rpc("a", rank=0, world_size=1, rpc_backend_options=theirs.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/store"))
    assert refused()
    child = os.fork()
    if not child:
        os._exit(0 if refused() else 1)
    assert os.waitpid(child, 0)[1] == 0
    theirs.shutdown()
assert theirs.__name__ == sys.modules["torch.distributed.rpc"].__name__ == "torch.distributed.rpc"
""",
    "a forked child inherits the replacement and can undo its own": """
import zmqgrad
zmqgrad.install()
child = os.fork()
if not child:
    zmqgrad.install()
    assert torch.distributed.rpc is zmqgrad.rpc
    zmqgrad.uninstall()
    os._exit(0 if torch.distributed.rpc is not zmqgrad.rpc else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.distributed.rpc is zmqgrad.rpc
""",
    "the environment variable replaces torch's RPC, which was imported before": """
os.environ["ZMQGRAD_REPLACE_TORCH_RPC"] = "1"
import zmqgrad
assert torch.distributed.rpc.__name__ == "zmqgrad.rpc"
""",
    "a module that another thread is importing is replaced, too": """
import threading
from importlib.machinery import PathFinder
import zmqgrad.replacement

class Late:
    def find_spec(self, name, path, target=None):
        if name != "torch.distributed.nn.api.remote_module":
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            begun.set()
            go_on.wait(60)
            execute(module)

        spec.loader.exec_module = exec_module
        return spec

def import_it():
    import torch.distributed.nn

begun, go_on = threading.Event(), threading.Event()
sys.meta_path.insert(0, Late())
thread = threading.Thread(target=import_it)
thread.start()
begun.wait(60)
threading.Timer(1, go_on.set).start()
zmqgrad.install()
thread.join()
from torch.distributed.nn import RemoteModule
assert RemoteModule is zmqgrad.nn.RemoteModule
""",
    "a finder of the time before Python 3.4 is no obstacle": """
import zmqgrad
warnings.filterwarnings("ignore", category=ImportWarning)

class Old:
    def find_module(self, name, path=None):
        return None

sys.meta_path.insert(0, Old())
zmqgrad.install()
from torch.distributed.nn import RemoteModule
assert RemoteModule is zmqgrad.nn.RemoteModule
""",
    "without the variable nothing is replaced": """
import zmqgrad.rpc
assert torch.distributed.rpc is not zmqgrad.rpc
""",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How the programs have ended."""
    programs = [(code, {}) for code in PROGRAMS.values()]
    return dict(zip(PROGRAMS, run_forks(tmp_path_factory.mktemp("forks"), SETUP, programs), strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_programs_find(ended: dict[str, Ended], name: str) -> None:
    assert ended[name].code == 0, ended[name].stderr


def test_a_variable_that_is_neither_1_nor_0_is_reported_by_the_command_and_by_a_program_with_torch() -> None:
    code = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
import zmqgrad.__main__ as command
assert command.main(["doctor"]) == 2
try:
    import torch
    raise SystemExit("torch was imported, with its own RPC")
except command.ConfigurationError as error:
    print(error)
"""
    output = run_python(code, env={"ZMQGRAD_REPLACE_TORCH_RPC": "maybe"})
    assert "ZMQGRAD_REPLACE_TORCH_RPC is 'maybe'; it must be 1 or 0" in output


@pytest.mark.parametrize(
    "imports", ["import zmqgrad.rpc", "import zmqgrad.store; assert 'torch' not in sys.modules; import torch"]
)
def test_the_environment_variable_replaces_torchs_rpc_once_it_is_imported(imports: str) -> None:
    code = f"import sys, warnings\nwarnings.simplefilter('ignore', DeprecationWarning)\n{imports}\n"
    code += "import torch\nassert torch.distributed.rpc.__name__ == 'zmqgrad.rpc'"
    code += "\nassert type(torch.__spec__.loader).__name__ == 'SourceFileLoader'"
    run_python(code, env={"ZMQGRAD_REPLACE_TORCH_RPC": "1"})
