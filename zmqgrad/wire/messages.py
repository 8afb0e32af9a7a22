"""Everything that can be said, on one page: one frozen struct a message, who tells whom what.

A message travels as ``envelope | header`` in one frame, then the frames that its blobs name; those may
also lie in shared memory, or side by side: then a :class:`Manifest` between envelope and header says where
(:mod:`zmqgrad.wire.frames` draws the envelope, :mod:`zmqgrad.wire.codec` does the work). The structs
here are the headers: decoding one validates every field and bound. Requests carry 0x100, responses
0x200, and a response repeats the message id of its request. Where torch's RPC has a number for a
message, ours is the same (DESIGN section 5).
"""

from __future__ import annotations

import enum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

REQUEST = 0x100
RESPONSE = 0x200

MAX_DIMENSIONS = 64
MAX_TENSORS = 1 << 20
MAX_TEXT = 1 << 20
MAX_KEY = 64 << 10
MAX_VALUE = 256 << 20
MAX_KEYS = 1 << 20
MAX_CODE = 256 << 10

Id = Annotated[int, Meta(ge=0)]  # msgpack itself ends at 2**64 - 1
WorkerId = Annotated[int, Meta(ge=0, lt=1 << 16)]
Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Name = Annotated[str, Meta(max_length=1024)]
Key = Annotated[str, Meta(max_length=MAX_KEY)]
Value = Annotated[bytes, Meta(max_length=MAX_VALUE)]
Mask = Annotated[bytes, Meta(max_length=MAX_TENSORS >> 3)]
Keys = Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS)]
Values = Annotated[tuple[Value, ...], Meta(max_length=MAX_KEYS)]


class MessageType(enum.IntEnum):
    """What an envelope announces."""

    # calls
    CALL = 0x02 | REQUEST
    RESULT = 0x03 | RESPONSE
    REMOTE_CALL = 0x05 | REQUEST
    REMOTE_RESULT = 0x06 | RESPONSE
    EXCEPTION = 0x37 | RESPONSE
    CANCEL = 0x38 | REQUEST
    CODE_FETCH = 0x39 | REQUEST
    CODE_VALUE = 0x3A | RESPONSE
    # references
    RREF_FETCH = 0x08 | REQUEST
    RREF_VALUE = 0x0A | RESPONSE
    RREF_USER_DELETE = 0x0B | REQUEST
    RREF_FORK_REQUEST = 0x0C | REQUEST
    RREF_CHILD_ACCEPT = 0x0D | REQUEST
    RREF_ACK = 0x0E | RESPONSE
    # autograd
    FORWARD_AUTOGRAD_REQ = 0x0F | REQUEST
    FORWARD_AUTOGRAD_RESP = 0x10 | RESPONSE
    BACKWARD_AUTOGRAD_REQ = 0x11 | REQUEST
    BACKWARD_AUTOGRAD_RESP = 0x12 | RESPONSE
    CLEANUP_AUTOGRAD_CONTEXT_REQ = 0x13 | REQUEST
    CLEANUP_AUTOGRAD_CONTEXT_RESP = 0x14 | RESPONSE
    DISCOVER_AUTOGRAD_REQ = 0x1A | REQUEST
    DISCOVER_AUTOGRAD_RESP = 0x1B | RESPONSE
    DROP_AUTOGRAD_REQ = 0x1C | REQUEST
    # store queries
    STORE_SET = 0x40 | REQUEST
    STORE_COMPARE_SET = 0x41 | REQUEST
    STORE_GET = 0x42 | REQUEST
    STORE_ADD = 0x43 | REQUEST
    STORE_CHECK = 0x44 | REQUEST
    STORE_WAIT = 0x45 | REQUEST
    STORE_GETNUMKEYS = 0x46 | REQUEST
    STORE_DELETE_KEY = 0x47 | REQUEST
    STORE_WATCH_KEY = 0x48 | REQUEST
    STORE_UNWATCH_KEY = 0x49 | REQUEST
    STORE_APPEND = 0x4A | REQUEST
    STORE_MULTI_GET = 0x4B | REQUEST
    STORE_MULTI_SET = 0x4C | REQUEST
    STORE_QUEUE_PUSH = 0x4D | REQUEST
    STORE_QUEUE_POP = 0x4E | REQUEST
    STORE_QUEUE_LEN = 0x4F | REQUEST
    STORE_LIST_KEYS = 0x50 | REQUEST
    STORE_PING = 0x51 | REQUEST
    STORE_WATCH_PREFIX = 0x52 | REQUEST
    STORE_LISTEN = 0x53 | REQUEST
    STORE_UNWATCH_PREFIX = 0x54 | REQUEST
    PREFIX_CALLBACK_REGISTERED = 0x57 | RESPONSE
    STORE_VALUE = 0x58 | RESPONSE
    STORE_NUMBER = 0x59 | RESPONSE
    STORE_VALUES = 0x5A | RESPONSE
    STORE_KEYS = 0x5B | RESPONSE
    STORE_DONE = 0x5C | RESPONSE
    STORE_REFUSED = 0x5D | RESPONSE
    STORE_PONG = 0x5E | RESPONSE
    KEY_CALLBACK_REGISTERED = 0x5F | RESPONSE
    # notices: published, neither request nor response
    KEY_CREATED = 0x60
    KEY_UPDATED = 0x61
    KEY_DELETED = 0x62
    PREFIX_CHANGED = 0x63
    # delivery
    HELLO = 0x70
    GOODBYE = 0x71
    ARENA_OFFER = 0x72 | REQUEST
    ARENA_ANSWER = 0x73 | RESPONSE
    RELEASE = 0x74
    CREDIT = 0x75
    CREDIT_WANTED = 0x76
    CHUNK = 0x77


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of every header. ``TYPE`` is what the envelope says of it."""

    TYPE: ClassVar[MessageType]

    def is_awaited_by(self, worker: int) -> bool:
        """Does ``worker`` wait for this, at the lane that the envelope names?"""
        return self.TYPE & RESPONSE != 0


class _Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of what messages are made of."""


# ---- where frames are -----------------------------------------------------------------------------------


class Piece(_Part, frozen=True):
    """Memory that frames lie in: block ``block`` of the sender's arena, or the next frame that follows.

    ``segment`` names the arena's segment, in which the block has ``size`` bytes at ``offset``. Where that is
    0, the frame follows, or it came before in chunks, as stream ``block``, if that is not 0.
    """

    segment: Id = 0
    block: Id = 0
    offset: Size = 0
    size: Size = 0


class Window(_Part, frozen=True):
    """One frame as its reader sees it: ``size`` bytes at ``offset`` of piece number ``piece``."""

    piece: Size
    offset: Size
    size: Size


class Manifest(_Part, frozen=True):
    """Where the frames of a message are, if not one by one behind it, and blocks that go back.

    Without ``windows``, the frames are those that follow. ``released``: blocks of the reader's own arena
    that the sender of the message has finished with.
    """

    pieces: Annotated[tuple[Piece, ...], Meta(max_length=MAX_TENSORS)] = ()
    windows: Annotated[tuple[Window, ...], Meta(max_length=MAX_TENSORS)] = ()
    released: Annotated[tuple[Id, ...], Meta(max_length=MAX_TENSORS)] = ()


# ---- what calls carry -----------------------------------------------------------------------------------


class Place(enum.IntEnum):
    """Where the bytes of a blob are."""

    INLINE = 0  # in the header itself
    FRAME = 1  # in a frame of their own, after the header


class Blob(_Part, frozen=True):
    """Some bytes: inline in ``data``, or ``size`` bytes at ``offset`` of frame number ``index``."""

    place: Place
    size: Size
    data: bytes = b""
    index: Size = 0
    offset: Size = 0


class Layout(enum.IntEnum):
    """How the bytes of a tensor make a tensor."""

    STRIDED = 0  # a window on its blob
    COO = 1  # parts: indices, values
    OPAQUE = 2  # the blob is what torch.save wrote


class TensorDescriptor(_Part, frozen=True):
    """One tensor: ``shape`` and ``strides`` in elements, ``offset`` in bytes from the start of its blob.

    Empty ``strides`` with a shape that has dimensions means contiguous.
    """

    dtype: Name
    shape: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMENSIONS)]
    strides: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMENSIONS)] = ()
    offset: Size = 0
    blob: Size = 0
    requires_grad: bool = False
    device: Name = "cpu"
    layout: Layout = Layout.STRIDED
    coalesced: bool = False
    parts: Annotated[tuple[TensorDescriptor, ...], Meta(max_length=2)] = ()


class Tensors(_Part, frozen=True):
    """Tensors beside a message, and the blobs that hold their bytes (tensors may share one)."""

    tensors: Annotated[tuple[TensorDescriptor, ...], Meta(max_length=MAX_TENSORS)] = ()
    blobs: Annotated[tuple[Blob, ...], Meta(max_length=MAX_TENSORS)] = ()


NO_TENSORS = Tensors()


class Form(enum.IntEnum):
    """How a payload's value is made from its pickle and its tensors."""

    NOTHING = 0  # None, or no arguments
    TENSOR = 1  # the one tensor itself
    TUPLE = 2  # a tuple of the tensors, in order
    PICKLE = 3  # a pickle in which tensors are replaced by their index
    PLAIN = 4  # None, bool, int, float, str or bytes, as msgpack
    ARGUMENTS = 5  # such, and tensors: msgpack of values, names of the last of them, and tensors' places


class Payload(_Part, frozen=True):
    """A Python value. ``pickled`` names the blob of its pickle or msgpack, ``buffers`` those beside a pickle.

    ``forks`` gives the references in it as (owner, rref id, fork id, parent): whoever drops a payload unread
    has to let go of them.
    """

    form: Form = Form.NOTHING
    tensors: Tensors = NO_TENSORS
    pickled: Blob | None = None
    buffers: Annotated[tuple[Blob, ...], Meta(max_length=MAX_TENSORS)] = ()
    forks: Annotated[tuple[tuple[WorkerId, Id, Id, WorkerId], ...], Meta(max_length=MAX_TENSORS)] = ()


NOTHING = Payload()


# ---- calls ----------------------------------------------------------------------------------------------


class Call(Message, frozen=True, tag=1):
    """Caller to callee: run ``function`` (``module:qualified.name``) on the payload (args, kwargs).

    An empty ``function`` means that the payload is (function, args, kwargs). ``timeout`` is the time
    left of the caller's deadline, 0 for none.
    """

    TYPE: ClassVar[MessageType] = MessageType.CALL
    function: Text
    payload: Payload
    timeout: Seconds = 0.0


class RemoteCall(Message, frozen=True, tag=2):
    """Caller to owner: as CALL, and keep the result as ``rref_id``, of which I am fork ``fork_id``."""

    TYPE: ClassVar[MessageType] = MessageType.REMOTE_CALL
    function: Text
    payload: Payload
    rref_id: Id
    fork_id: Id
    timeout: Seconds = 0.0


class Result(Message, frozen=True, tag=3):
    """Callee to caller: what the function returned."""

    TYPE: ClassVar[MessageType] = MessageType.RESULT
    payload: Payload = NOTHING


class RemoteResult(Message, frozen=True, tag=4):
    """Owner to caller: the function has run (or failed; a fetch will tell); your fork is known."""

    TYPE: ClassVar[MessageType] = MessageType.REMOTE_RESULT
    rref_id: Id
    fork_id: Id


class ExceptionReply(Message, frozen=True, tag=5):
    """Callee to caller: instead of an answer, this exception.

    ``pickled`` rebuilds it; where that is empty or fails, ``kind`` (qualified name of its type) and
    ``text`` speak. ``worker`` names where it happened.
    """

    TYPE: ClassVar[MessageType] = MessageType.EXCEPTION
    worker: Name
    kind: Text
    text: str
    traceback: str
    pickled: bytes = b""


class Cancel(Message, frozen=True):
    """Caller to callee: I have given up waiting for ``call`` (a message id). Not answered."""

    TYPE: ClassVar[MessageType] = MessageType.CANCEL
    call: Id


class CodeFetch(Message, frozen=True):
    """Callee to caller, or the other way round: what is the code whose hash is ``digest``?"""

    TYPE: ClassVar[MessageType] = MessageType.CODE_FETCH
    digest: Annotated[bytes, Meta(max_length=64)]


class CodeValue(Message, frozen=True):
    """Answer to CODE_FETCH: this, for the interpreter that ``python`` names; empty if I have forgotten it."""

    TYPE: ClassVar[MessageType] = MessageType.CODE_VALUE
    python: Annotated[bytes, Meta(max_length=64)]
    code: Annotated[bytes, Meta(max_length=MAX_CODE)] = b""


# ---- references -----------------------------------------------------------------------------------------


class RRefFetch(Message, frozen=True, tag=6):
    """User to owner: send me the value, once it is there."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_FETCH
    rref_id: Id
    timeout: Seconds = 0.0


class RRefValue(Message, frozen=True, tag=7):
    """Owner to user: the value."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_VALUE
    payload: Payload = NOTHING


class RRefForkRequest(Message, frozen=True):
    """New user to owner: I hold fork ``fork_id`` of ``rref_id``; count me."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_FORK_REQUEST
    rref_id: Id
    fork_id: Id


class RRefChildAccept(Message, frozen=True):
    """New user (or the owner) to the parent: the owner knows of child ``fork_id``; let go if you like."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_CHILD_ACCEPT
    rref_id: Id
    fork_id: Id


class RRefUserDelete(Message, frozen=True):
    """User to owner: these forks, as (rref id, fork id), are gone."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_USER_DELETE
    forks: Annotated[tuple[tuple[Id, Id], ...], Meta(max_length=MAX_TENSORS)]


class RRefAck(Message, frozen=True):
    """Answer to the three above: heard. Hearing one twice is harmless."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_ACK


# ---- autograd -------------------------------------------------------------------------------------------


class ForwardAutogradReq(Message, frozen=True):
    """Caller to callee: ``wrapped``, as part of a context.

    ``autograd_id`` joins the *send* of the caller to the *recv* of the callee; 0 if no tensor that
    travels requires grad. Without ``answer_wanted`` the caller does not differentiate (``torch.no_grad``),
    and the answer shall leave no send.
    """

    TYPE: ClassVar[MessageType] = MessageType.FORWARD_AUTOGRAD_REQ
    context_id: Id
    autograd_id: Id
    wrapped: Call | RemoteCall | RRefFetch
    answer_wanted: bool = True


class ForwardAutogradResp(Message, frozen=True):
    """Callee to caller: ``wrapped``, as part of a context; the same the other way round."""

    TYPE: ClassVar[MessageType] = MessageType.FORWARD_AUTOGRAD_RESP
    context_id: Id
    autograd_id: Id
    wrapped: Result | RemoteResult | RRefValue


class Waiting(_Part, frozen=True):
    """What stood still on ``worker`` after its ``tick``-th step of a pass."""

    worker: WorkerId
    tick: Size
    waits: bool = False
    """Groups that something has reached wait for something else."""


class Handled(_Part, frozen=True):
    """A worker has handled the gradients for ``autograd_id``, and that set off the requests in ``sent``.

    ``sent`` gives (autograd id, worker) of each. ``error`` is what went wrong.
    """

    autograd_id: Id
    sent: Annotated[tuple[tuple[Id, WorkerId], ...], Meta(max_length=MAX_TENSORS)]
    waiting: Waiting
    error: ExceptionReply | None = None


class BackwardAutogradReq(Message, frozen=True):
    """Worker of a *recv* to worker of its *send*: the gradients of the tensors that you sent.

    ``gradients`` gives, for each tensor of the send, its index in ``tensors``, or -1 where no gradient
    exists (which is not the same as zeros). ``root`` started the pass and counts what is under way. Where
    the message goes to the root itself, ``handled`` spares an answer of its own (BACKWARD_AUTOGRAD_RESP,
    whose message id is the pass id).
    """

    TYPE: ClassVar[MessageType] = MessageType.BACKWARD_AUTOGRAD_REQ
    context_id: Id
    pass_id: Id
    autograd_id: Id
    root: WorkerId
    gradients: Annotated[tuple[Annotated[int, Meta(ge=-1)], ...], Meta(max_length=MAX_TENSORS)]
    tensors: Tensors = NO_TENSORS
    retain_graph: bool = False
    handled: Handled | None = None

    def is_awaited_by(self, worker: int) -> bool:
        """The root of the pass waits for it."""
        return worker == self.root


class BackwardAutogradResp(Message, frozen=True):
    """Worker to the root of the pass: what I have handled.

    When the root has seen every request that it was told of handled, nothing of the pass is in flight.
    """

    TYPE: ClassVar[MessageType] = MessageType.BACKWARD_AUTOGRAD_RESP
    handled: Handled


class Reach(_Part, frozen=True):
    """Which recvs on ``worker`` each of its entries leads to, as far as they have not been sent on.

    ``sends`` gives (autograd id, receiving worker, what was sent). Masks are little-endian, bit 0 for the
    roots of the pass and bit i + 1 for send i: ``arrived``, and in ``groups`` that of each group, beside the
    (autograd id, worker) of its recvs.
    """

    worker: WorkerId
    sends: Annotated[tuple[tuple[Id, WorkerId, Text], ...], Meta(max_length=MAX_TENSORS)]
    arrived: Mask
    groups: Annotated[
        tuple[tuple[Mask, Annotated[tuple[tuple[Id, WorkerId], ...], Meta(max_length=MAX_TENSORS)]], ...],
        Meta(max_length=MAX_TENSORS),
    ]


class DiscoverAutogradReq(Message, frozen=True):
    """Root of a pass to a worker: what may still arrive with you, and where would it lead?

    Answer: DISCOVER_AUTOGRAD_RESP.
    """

    TYPE: ClassVar[MessageType] = MessageType.DISCOVER_AUTOGRAD_REQ
    context_id: Id
    pass_id: Id
    retain_graph: bool


class DiscoverAutogradResp(Message, frozen=True):
    """Answer to the above."""

    TYPE: ClassVar[MessageType] = MessageType.DISCOVER_AUTOGRAD_RESP
    reach: Reach


class DropAutogradReq(Message, frozen=True):
    """Root of a pass to a worker: no gradient will come for ``sends``, go on without them.

    ``request`` stands for this message in the report, which is a BACKWARD_AUTOGRAD_RESP.
    """

    TYPE: ClassVar[MessageType] = MessageType.DROP_AUTOGRAD_REQ
    context_id: Id
    pass_id: Id
    request: Id
    root: WorkerId
    retain_graph: bool
    sends: Annotated[tuple[Id, ...], Meta(max_length=MAX_TENSORS)]


class CleanupAutogradContextReq(Message, frozen=True):
    """Worker that leaves contexts to those it told of them: forget them, and pass it on.

    ``passes``: context and number of backward passes that have ended in contexts that go on: the same.
    """

    TYPE: ClassVar[MessageType] = MessageType.CLEANUP_AUTOGRAD_CONTEXT_REQ
    contexts: Annotated[tuple[Id, ...], Meta(max_length=MAX_TENSORS)]
    passes: Annotated[tuple[tuple[Id, Id], ...], Meta(max_length=MAX_TENSORS)] = ()


class CleanupAutogradContextResp(Message, frozen=True):
    """Answer to the above: forgotten, or never known."""

    TYPE: ClassVar[MessageType] = MessageType.CLEANUP_AUTOGRAD_CONTEXT_RESP


# ---- store: client to server ----------------------------------------------------------------------------
# Timeouts are the time left at the client, in seconds; the server stops waiting when it is over.


class StoreSet(Message, frozen=True):
    """Set ``key``. Answer: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_SET
    key: Key
    value: Value


class StoreCompareSet(Message, frozen=True):
    """Set ``key`` if it holds ``expected`` (or is missing and ``expected`` is empty). Answer: STORE_VALUE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_COMPARE_SET
    key: Key
    expected: Value
    desired: Value


class StoreGet(Message, frozen=True):
    """The value of ``key``, once it exists. Answer: STORE_VALUE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_GET
    key: Key
    timeout: Seconds


class StoreAdd(Message, frozen=True):
    """Add ``amount`` to the number at ``key`` (0 if missing). Answer: STORE_NUMBER, the sum."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_ADD
    key: Key
    amount: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class StoreCheck(Message, frozen=True):
    """Do all ``keys`` exist? Answer: STORE_NUMBER, 1 or 0."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_CHECK
    keys: Keys


class StoreWait(Message, frozen=True):
    """Wait until all ``keys`` exist. Answer: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_WAIT
    keys: Keys
    timeout: Seconds


class StoreGetNumKeys(Message, frozen=True):
    """How many keys are there? Answer: STORE_NUMBER."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_GETNUMKEYS


class StoreDeleteKey(Message, frozen=True):
    """Delete ``key``. Answer: STORE_NUMBER, 1 if it was there."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_DELETE_KEY
    key: Key


class StoreWatchKey(Message, frozen=True):
    """Give notice of each change of ``key`` on the connection that is known as ``nonce`` (STORE_LISTEN).

    Answer: KEY_CALLBACK_REGISTERED.
    """

    TYPE: ClassVar[MessageType] = MessageType.STORE_WATCH_KEY
    key: Key
    nonce: Name


class StoreWatchPrefix(Message, frozen=True):
    """As STORE_WATCH_KEY, for all keys that begin with ``prefix``; ``nonce`` likewise.

    Answer: PREFIX_CALLBACK_REGISTERED.
    """

    TYPE: ClassVar[MessageType] = MessageType.STORE_WATCH_PREFIX
    prefix: Key
    nonce: Name


class StoreUnwatchKey(Message, frozen=True):
    """Give no more notice of ``key`` on the connection known as ``nonce``. Answer: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_UNWATCH_KEY
    key: Key
    nonce: Name = ""


class StoreUnwatchPrefix(Message, frozen=True):
    """As STORE_UNWATCH_KEY, for a watch of all keys that begin with ``prefix``. Answer: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_UNWATCH_PREFIX
    prefix: Key
    nonce: Name = ""


class StoreAppend(Message, frozen=True):
    """Append ``value`` to ``key`` (created if missing). Answer: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_APPEND
    key: Key
    value: Value


class StoreMultiGet(Message, frozen=True):
    """The values of ``keys``, once all exist. Answer: STORE_VALUES."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_MULTI_GET
    keys: Keys
    timeout: Seconds


class StoreMultiSet(Message, frozen=True):
    """Set ``keys`` to ``values``, one to one. Answer: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_MULTI_SET
    keys: Keys
    values: Values


class StoreQueuePush(Message, frozen=True):
    """Push ``value`` to the end of the queue ``key``. Answer: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_QUEUE_PUSH
    key: Key
    value: Value


class StoreQueuePop(Message, frozen=True):
    """Take the first value of the queue ``key``; with ``block``, once there is one. Answer: STORE_VALUE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_QUEUE_POP
    key: Key
    block: bool
    timeout: Seconds


class StoreQueueLen(Message, frozen=True):
    """How many values are in the queue ``key``? Answer: STORE_NUMBER."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_QUEUE_LEN
    key: Key


class StoreListKeys(Message, frozen=True):
    """All keys that start with ``prefix``. Answer: STORE_KEYS, sorted."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_LIST_KEYS
    prefix: Key


class StorePing(Message, frozen=True):
    """Are you there? Answer: STORE_PONG with the same nonce."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_PING
    nonce: Name


class StoreListen(Message, frozen=True):
    """This connection is for notices, and known as ``nonce``. Answer: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_LISTEN
    nonce: Name


# ---- store: server to client ----------------------------------------------------------------------------


class StoreValue(Message, frozen=True):
    """A value, and the store's revision when it was read."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_VALUE
    value: Value
    revision: Size = 0


class StoreNumber(Message, frozen=True):
    """A number."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_NUMBER
    number: int


class StoreValues(Message, frozen=True):
    """Values, in the order of the keys asked for."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_VALUES
    values: Values


class StoreKeys(Message, frozen=True):
    """Keys."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_KEYS
    keys: Keys


class StoreDone(Message, frozen=True):
    """Done."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_DONE


class Refusal(enum.IntEnum):
    """Why a store query was refused."""

    TIMEOUT = 0
    MISSING = 1
    INVALID = 2
    LIMIT = 3
    CLOSING = 4
    UNKNOWN = 5  # the connection for notices


class StoreRefused(Message, frozen=True):
    """Not done, and why."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_REFUSED
    reason: Refusal
    text: Text


class StorePong(Message, frozen=True):
    """Here I am, and this is the store's revision."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_PONG
    nonce: Name
    revision: Size


class KeyCallbackRegistered(Message, frozen=True):
    """Your watch of ``key`` is live since ``revision``, when it held ``value`` (None: it did not exist)."""

    TYPE: ClassVar[MessageType] = MessageType.KEY_CALLBACK_REGISTERED
    key: Key
    revision: Size
    value: Value | None


class PrefixCallbackRegistered(Message, frozen=True):
    """Your watch of ``prefix`` is live since ``revision``, when these ``keys`` held these ``values``."""

    TYPE: ClassVar[MessageType] = MessageType.PREFIX_CALLBACK_REGISTERED
    prefix: Key
    revision: Size
    keys: Keys
    values: Values


# ---- notices: store server to everybody who watches the key ---------------------------------------------


class KeyCreated(Message, frozen=True):
    """``key`` came to exist. ``previous`` is the revision of the key's notice before, 0 if none."""

    TYPE: ClassVar[MessageType] = MessageType.KEY_CREATED
    key: Key
    revision: Size
    previous: Size
    new: Value | None


class KeyUpdated(Message, frozen=True):
    """``key`` was set. Values above a size are left out (None): read them."""

    TYPE: ClassVar[MessageType] = MessageType.KEY_UPDATED
    key: Key
    revision: Size
    previous: Size
    old: Value | None
    new: Value | None


class PrefixChanged(Message, frozen=True):
    """``key``, which begins with ``prefix``, holds ``new`` now; None: it was deleted.

    ``previous`` is the revision of the prefix's notice before, 0 if none. With ``left_out``, the value is
    too large for a notice: read it.
    """

    TYPE: ClassVar[MessageType] = MessageType.PREFIX_CHANGED
    prefix: Key
    revision: Size
    previous: Size
    key: Key
    new: Value | None
    left_out: bool = False


class KeyDeleted(Message, frozen=True):
    """``key`` was deleted."""

    TYPE: ClassVar[MessageType] = MessageType.KEY_DELETED
    key: Key
    revision: Size
    previous: Size
    old: Value | None


# ---- delivery -------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Worker to worker, at the first contact: who I am."""

    TYPE: ClassVar[MessageType] = MessageType.HELLO
    name: Name


class Goodbye(Message, frozen=True):
    """Worker to its peers: I leave in good order; nothing more will come from me."""

    TYPE: ClassVar[MessageType] = MessageType.GOODBYE


class ArenaOffer(Message, frozen=True):
    """Worker to a peer, before the first large message: can you read my memory?

    ``segment`` is ``size`` bytes of shared memory, descriptor ``descriptor`` of process ``pid``, whose
    device and inode are ``device`` and ``inode``. What stands at ``nonce_at`` is the proof that you can.
    While you use it, hold the lock of byte ``lock``.
    """

    TYPE: ClassVar[MessageType] = MessageType.ARENA_OFFER
    segment: Id
    size: Size
    pid: Size
    descriptor: Size
    device: Id
    inode: Id
    nonce_at: Size
    lock: Size


class ArenaAnswer(Message, frozen=True):
    """Answer to ARENA_OFFER: the ``nonce`` that I read, or empty if I cannot, and ``why``."""

    TYPE: ClassVar[MessageType] = MessageType.ARENA_ANSWER
    nonce: Annotated[bytes, Meta(max_length=64)]
    why: Text = ""


class Release(Message, frozen=True):
    """Worker to a peer that it has no message for: its manifest releases blocks."""

    TYPE: ClassVar[MessageType] = MessageType.RELEASE


class Credit(Message, frozen=True):
    """Worker to a peer: of the frames that you sent me I have taken in so many bytes more.

    ``requests`` in those of requests, ``answers`` in those of answers.
    """

    TYPE: ClassVar[MessageType] = MessageType.CREDIT
    requests: Size = 0
    answers: Size = 0


class CreditWanted(Message, frozen=True):
    """Worker to a peer: a message waits here; tell me (CREDIT) when you have taken in so many bytes more.

    0 in ``requests`` or in ``answers``: nothing of that kind waits. ``again``: it has waited for long, and
    this comes behind all that I sent, so count what you have not got as taken in.
    """

    TYPE: ClassVar[MessageType] = MessageType.CREDIT_WANTED
    requests: Size = 0
    answers: Size = 0
    again: bool = False


class Chunk(Message, frozen=True):
    """Worker to a peer: the part at ``offset`` of a frame of ``total`` bytes; its message will follow.

    The manifest of that names the frame by ``stream``. Chunks come in order.
    """

    TYPE: ClassVar[MessageType] = MessageType.CHUNK
    stream: Id
    offset: Size
    total: Size


def _all_messages(base: type[Message]) -> list[type[Message]]:
    return [c for sub in base.__subclasses__() for c in (sub, *_all_messages(sub))]


BY_TYPE: dict[MessageType, type[Message]] = {c.TYPE: c for c in _all_messages(Message)}
