"""Everything that can be said, on one page: who tells whom what, and what they answer.

A message travels as ``envelope | header`` in one frame, then the frames that its blobs name; those may
also lie in shared memory, or side by side: then a :class:`Manifest` between envelope and header says where
(:mod:`zmqgrad.wire.frames` draws the envelope, :mod:`zmqgrad.wire.codec` does the work). The structs
here are the headers, one frozen struct a message: decoding one validates every field and bound. A response
repeats the message id of its request.

Calls (:mod:`~zmqgrad.wire.messages.calls`; what they carry: :mod:`~zmqgrad.wire.messages.payloads`)::

    CALL                           caller to callee: run this function on these arguments -> RESULT
    RESULT                         callee to caller: what it returned
    REMOTE_CALL                    caller to owner: run it, and keep the result as this RRef -> REMOTE_RESULT
    REMOTE_RESULT                  owner to caller: it has run, or failed; your fork is known
    EXCEPTION                      whoever was asked anything: instead of the answer, this went wrong
    CANCEL                         caller to callee: I have given up waiting for this call

References (:mod:`~zmqgrad.wire.messages.references`)::

    RREF_FETCH                     user to owner: send me the value, once it is there -> RREF_VALUE
    RREF_VALUE                     owner to user: the value
    RREF_USER_DELETE               user to owner: these forks are gone -> RREF_ACK
    RREF_FORK_REQUEST              new user to owner: I hold this fork, count me -> RREF_ACK
    RREF_CHILD_ACCEPT              new user to its parent: the owner knows of me, let go -> RREF_ACK
    RREF_ACK                       answer to these three: heard

Autograd (:mod:`~zmqgrad.wire.messages.autograd`)::

    FORWARD_AUTOGRAD_REQ           caller to callee: this request, in a context -> FORWARD_AUTOGRAD_RESP
    FORWARD_AUTOGRAD_RESP          callee to caller: its answer, in that context
    BACKWARD_AUTOGRAD_REQ          recv to its send: gradients of what you sent -> BACKWARD_AUTOGRAD_RESP
    BACKWARD_AUTOGRAD_RESP         worker to the root of the pass: handled, and this is what it set off
    CLEANUP_AUTOGRAD_CONTEXT_REQ   who left contexts, onwards: forget them -> CLEANUP_AUTOGRAD_CONTEXT_RESP
    CLEANUP_AUTOGRAD_CONTEXT_RESP  answer: forgotten
    DISCOVER_AUTOGRAD_REQ          root to worker: what may still arrive with you? -> DISCOVER_AUTOGRAD_RESP
    DISCOVER_AUTOGRAD_RESP         answer: this, and where it would lead
    DROP_AUTOGRAD_REQ              root to worker: for these sends none will come -> BACKWARD_AUTOGRAD_RESP

Store (:mod:`~zmqgrad.wire.messages.store`), client to server and back::

    STORE_SET                      set this key -> STORE_DONE
    STORE_COMPARE_SET              set it if it holds what I expect -> STORE_VALUE
    STORE_GET                      its value, once it exists -> STORE_VALUE
    STORE_ADD                      add to the number in it -> STORE_NUMBER
    STORE_CHECK                    do all these keys exist? -> STORE_NUMBER
    STORE_WAIT                     say when they all do -> STORE_DONE
    STORE_GETNUMKEYS               how many keys are there? -> STORE_NUMBER
    STORE_DELETE_KEY               delete this key -> STORE_NUMBER
    STORE_APPEND                   append to its value -> STORE_DONE
    STORE_MULTI_GET                the values of these keys, once all exist -> STORE_VALUES
    STORE_MULTI_SET                set all of them -> STORE_DONE
    STORE_QUEUE_PUSH               push to the end of this queue -> STORE_DONE
    STORE_QUEUE_POP                take its first item -> STORE_ITEM
    STORE_QUEUE_ACK                that item has arrived -> STORE_NUMBER
    STORE_QUEUE_LEN                how many values are in it? -> STORE_NUMBER
    STORE_LIST_KEYS                all keys that start so -> STORE_KEYS
    STORE_PING                     are you there? -> STORE_PONG
    STORE_VALUE                    answer: a value
    STORE_ITEM                     answer: an item of a queue, to be acknowledged
    STORE_NUMBER                   answer: a number
    STORE_VALUES                   answer: values
    STORE_KEYS                     answer: keys
    STORE_DONE                     answer: done
    STORE_REFUSED                  instead of any of these: not done, and why
    STORE_PONG                     reply: here I am, and here is my fast path

Watching keys (:mod:`~zmqgrad.wire.messages.watching`), client to server and back::

    STORE_WATCH_CHANNEL            where are notifications published? -> STORE_CHANNEL
    STORE_CHANNEL                  reply: at this endpoint, and at this tcp port
    STORE_WATCH_KEY                publish each change of this key -> KEY_CALLBACK_REGISTERED
    STORE_UNWATCH_KEY              not for me any more -> STORE_DONE
    STORE_WATCH_PREFIX             ... of all keys that start so -> PREFIX_CALLBACK_REGISTERED
    STORE_UNWATCH_PREFIX           not for me any more -> STORE_DONE
    STORE_RENEW_WATCHES            I still watch these -> STORE_REVISIONS
    STORE_REVISIONS                reply: the revision of the last notification of each
    KEY_CALLBACK_REGISTERED        reply: from this revision on, when the key held this
    PREFIX_CALLBACK_REGISTERED     reply: from this revision on, when these keys held these values
    KEY_CREATED                    notification: this key came to exist
    KEY_UPDATED                    notification: it was set
    KEY_DELETED                    notification: it was deleted
    PREFIX_CHANGED                 notification: a key under this prefix holds this now, or was deleted

Delivery (:mod:`~zmqgrad.wire.messages.delivery`), worker to worker::

    HELLO                          reserved, nobody sends it: every envelope says who sends
    GOODBYE                        I have declared you lost: you will get nothing more of me
    ARENA_OFFER                    can you read my memory? -> ARENA_ANSWER
    ARENA_ANSWER                   this is what stands there; or not, and why
    RELEASE                        I have finished with blocks of yours, as the manifest says
    CREDIT                         I have taken in so much of what you sent
    CREDIT_WANTED                  something waits here: say CREDIT when you have taken in so much more
    CHUNK                          part of a large frame, ahead of its message
    ACK                            I have received all of yours up to a number, as the envelope says
"""

from __future__ import annotations

from zmqgrad.wire.messages.autograd import (
    NO_GRADIENT,
    NOT_REACHED,
    BackwardAutogradReq,
    BackwardAutogradResp,
    CleanupAutogradContextReq,
    CleanupAutogradContextResp,
    DiscoverAutogradReq,
    DiscoverAutogradResp,
    DropAutogradReq,
    ForwardAutogradReq,
    ForwardAutogradResp,
    ProgressReport,
    ReachabilityReport,
    StallReport,
)
from zmqgrad.wire.messages.base import (
    MAX_DIMENSIONS,
    MAX_KEY,
    MAX_KEYS,
    MAX_TENSORS,
    MAX_TEXT,
    MAX_VALUE,
    REQUEST,
    RESPONSE,
    Id,
    Key,
    Keys,
    Mask,
    Message,
    MessageType,
    Name,
    Seconds,
    Size,
    Text,
    Value,
    Values,
    WorkerId,
)
from zmqgrad.wire.messages.calls import (
    Call,
    Cancel,
    ExceptionReply,
    RemoteCall,
    RemoteResult,
    Result,
)
from zmqgrad.wire.messages.delivery import (
    Ack,
    ArenaAnswer,
    ArenaOffer,
    Chunk,
    Credit,
    CreditWanted,
    Goodbye,
    Hello,
    Manifest,
    Piece,
    Release,
    Window,
)
from zmqgrad.wire.messages.payloads import (
    NO_TENSORS,
    NONE_PAYLOAD,
    Blob,
    BlobLocation,
    Layout,
    Payload,
    PayloadFormat,
    TensorBatch,
    TensorDescriptor,
    Tensors,
)
from zmqgrad.wire.messages.references import (
    RRefAck,
    RRefChildAccept,
    RRefFetch,
    RRefForkRequest,
    RRefUserDelete,
    RRefValue,
)
from zmqgrad.wire.messages.store import (
    Refusal,
    StoreAdd,
    StoreAppend,
    StoreCheck,
    StoreCompareSet,
    StoreDeleteKey,
    StoreDone,
    StoreGet,
    StoreGetNumKeys,
    StoreItem,
    StoreKeys,
    StoreListKeys,
    StoreMultiGet,
    StoreMultiSet,
    StoreNumber,
    StorePing,
    StorePong,
    StoreQueueAck,
    StoreQueueLen,
    StoreQueuePop,
    StoreQueuePush,
    StoreRefused,
    StoreSet,
    StoreValue,
    StoreValues,
    StoreWait,
)
from zmqgrad.wire.messages.watching import (
    UNKNOWN_WATCH,
    KeyCallbackRegistered,
    KeyCreated,
    KeyDeleted,
    KeyUpdated,
    PrefixCallbackRegistered,
    PrefixChanged,
    StoreChannel,
    StoreRenewWatches,
    StoreRevisions,
    StoreUnwatchKey,
    StoreUnwatchPrefix,
    StoreWatchChannel,
    StoreWatchKey,
    StoreWatchPrefix,
)


def _all_messages(base: type[Message]) -> list[type[Message]]:
    return [c for sub in base.__subclasses__() for c in (sub, *_all_messages(sub))]


BY_TYPE: dict[MessageType, type[Message]] = {c.TYPE: c for c in _all_messages(Message)}
"""The struct of each type."""

__all__ = [
    "BY_TYPE",
    "MAX_DIMENSIONS",
    "MAX_KEY",
    "MAX_KEYS",
    "MAX_TENSORS",
    "MAX_TEXT",
    "MAX_VALUE",
    "NONE_PAYLOAD",
    "NOT_REACHED",
    "NO_GRADIENT",
    "NO_TENSORS",
    "REQUEST",
    "RESPONSE",
    "UNKNOWN_WATCH",
    "Ack",
    "ArenaAnswer",
    "ArenaOffer",
    "BackwardAutogradReq",
    "BackwardAutogradResp",
    "Blob",
    "BlobLocation",
    "Call",
    "Cancel",
    "Chunk",
    "CleanupAutogradContextReq",
    "CleanupAutogradContextResp",
    "Credit",
    "CreditWanted",
    "DiscoverAutogradReq",
    "DiscoverAutogradResp",
    "DropAutogradReq",
    "ExceptionReply",
    "ForwardAutogradReq",
    "ForwardAutogradResp",
    "Goodbye",
    "Hello",
    "Id",
    "Key",
    "KeyCallbackRegistered",
    "KeyCreated",
    "KeyDeleted",
    "KeyUpdated",
    "Keys",
    "Layout",
    "Manifest",
    "Mask",
    "Message",
    "MessageType",
    "Name",
    "Payload",
    "PayloadFormat",
    "Piece",
    "PrefixCallbackRegistered",
    "PrefixChanged",
    "ProgressReport",
    "RRefAck",
    "RRefChildAccept",
    "RRefFetch",
    "RRefForkRequest",
    "RRefUserDelete",
    "RRefValue",
    "ReachabilityReport",
    "Refusal",
    "Release",
    "RemoteCall",
    "RemoteResult",
    "Result",
    "Seconds",
    "Size",
    "StallReport",
    "StoreAdd",
    "StoreAppend",
    "StoreChannel",
    "StoreCheck",
    "StoreCompareSet",
    "StoreDeleteKey",
    "StoreDone",
    "StoreGet",
    "StoreGetNumKeys",
    "StoreItem",
    "StoreKeys",
    "StoreListKeys",
    "StoreMultiGet",
    "StoreMultiSet",
    "StoreNumber",
    "StorePing",
    "StorePong",
    "StoreQueueAck",
    "StoreQueueLen",
    "StoreQueuePop",
    "StoreQueuePush",
    "StoreRefused",
    "StoreRenewWatches",
    "StoreRevisions",
    "StoreSet",
    "StoreUnwatchKey",
    "StoreUnwatchPrefix",
    "StoreValue",
    "StoreValues",
    "StoreWait",
    "StoreWatchChannel",
    "StoreWatchKey",
    "StoreWatchPrefix",
    "TensorBatch",
    "TensorDescriptor",
    "Tensors",
    "Text",
    "Value",
    "Values",
    "Window",
    "WorkerId",
]
