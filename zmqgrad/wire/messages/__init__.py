"""All messages on one page: sender, receiver, purpose, and the reply to each request.

A message is sent as ``envelope | header`` in one frame, followed by the frames that its blobs refer to.
Frames in shared memory, or several in one ZeroMQ frame, are located by a :class:`Manifest` between envelope
and header. :mod:`zmqgrad.wire.frames` documents the envelope, :mod:`zmqgrad.wire.codec` encodes and decodes.
The structs here are the headers, one frozen struct per message; decoding validates every field and bound. A
response repeats the message id of its request.

Calls (:mod:`~zmqgrad.wire.messages.calls`; what they carry: :mod:`~zmqgrad.wire.messages.payloads`)::

    CALL                           caller to callee: run this function with these arguments -> RESULT
    RESULT                         callee to caller: the return value
    REMOTE_CALL                    caller to owner: run it and keep the result as this RRef -> REMOTE_RESULT
    REMOTE_RESULT                  owner to caller: it has finished or failed; the fork is registered
    EXCEPTION                      reply to any request of these families: it raised this exception
    CANCEL                         caller to callee: no longer waiting for this call

References (:mod:`~zmqgrad.wire.messages.references`)::

    RREF_FETCH                     user to owner: send the value as soon as it exists -> RREF_VALUE
    RREF_VALUE                     owner to user: the value
    RREF_USER_DELETE               user to owner: these forks were deleted -> RREF_ACK
    RREF_FORK_REQUEST              new user to owner: register this fork -> RREF_ACK
    RREF_CHILD_ACCEPT              new user to its parent: the owner has registered this child -> RREF_ACK
    RREF_ACK                       reply to these three: received

Autograd (:mod:`~zmqgrad.wire.messages.autograd`)::

    FORWARD_AUTOGRAD_REQ           caller to callee: a request inside a context -> FORWARD_AUTOGRAD_RESP
    FORWARD_AUTOGRAD_RESP          callee to caller: its reply, inside the same context
    BACKWARD_AUTOGRAD_REQ          recv to its send: gradients of the sent tensors -> BACKWARD_AUTOGRAD_RESP
    BACKWARD_AUTOGRAD_RESP         worker to the root of the pass: requests handled, and those sent in turn
    CLEANUP_AUTOGRAD_CONTEXT_REQ   worker to its peers in it: release it -> CLEANUP_AUTOGRAD_CONTEXT_RESP
    CLEANUP_AUTOGRAD_CONTEXT_RESP  reply: released
    DISCOVER_AUTOGRAD_REQ          root to worker: report what its sends reach -> DISCOVER_AUTOGRAD_RESP
    DISCOVER_AUTOGRAD_RESP         reply: the report
    DROP_AUTOGRAD_REQ              root to worker: these sends get no gradient -> BACKWARD_AUTOGRAD_RESP

Store (:mod:`~zmqgrad.wire.messages.store`), client to server and back::

    STORE_SET                      set a key -> STORE_DONE
    STORE_COMPARE_SET              set a key if it holds the expected value -> STORE_VALUE
    STORE_GET                      get a value, once its key exists -> STORE_VALUE
    STORE_ADD                      add to the number at a key -> STORE_NUMBER
    STORE_CHECK                    check whether all these keys exist -> STORE_NUMBER
    STORE_WAIT                     wait until all these keys exist -> STORE_DONE
    STORE_GETNUMKEYS               count the keys -> STORE_NUMBER
    STORE_DELETE_KEY               delete a key -> STORE_NUMBER
    STORE_APPEND                   append to a value -> STORE_DONE
    STORE_MULTI_GET                get several values, once all keys exist -> STORE_VALUES
    STORE_MULTI_SET                set several keys -> STORE_DONE
    STORE_QUEUE_PUSH               push to the end of a queue -> STORE_DONE
    STORE_QUEUE_POP                pop the first item of a queue -> STORE_ITEM
    STORE_QUEUE_ACK                acknowledge a popped item -> STORE_NUMBER
    STORE_QUEUE_LEN                count the items of a queue -> STORE_NUMBER
    STORE_LIST_KEYS                list the keys with a prefix -> STORE_KEYS
    STORE_PING                     check that the server is alive -> STORE_PONG
    STORE_VALUE                    reply: a value
    STORE_ITEM                     reply: an item of a queue, to be acknowledged
    STORE_NUMBER                   reply: a number
    STORE_VALUES                   reply: values
    STORE_KEYS                     reply: keys
    STORE_DONE                     reply: done
    STORE_REFUSED                  reply to any of these: not done, and why
    STORE_PONG                     reply: alive, and the address of the fast path

Watching keys (:mod:`~zmqgrad.wire.messages.watching`), client to server and back::

    STORE_WATCH_CHANNEL            get the endpoint of the notifications -> STORE_CHANNEL
    STORE_CHANNEL                  reply: the local endpoint and the tcp port
    STORE_WATCH_KEY                publish each change of a key -> KEY_CALLBACK_REGISTERED
    STORE_UNWATCH_KEY              end a watch -> STORE_DONE
    STORE_WATCH_PREFIX             publish each change of keys with a prefix -> PREFIX_CALLBACK_REGISTERED
    STORE_UNWATCH_PREFIX           end a watch -> STORE_DONE
    STORE_RENEW_WATCHES            keep these watches -> STORE_REVISIONS
    STORE_REVISIONS                reply: the revision of the last notification of each
    KEY_CALLBACK_REGISTERED        reply: live since this revision, when the key held this value
    PREFIX_CALLBACK_REGISTERED     reply: live since this revision, when the keys held these values
    KEY_CREATED                    notification: the key was created
    KEY_UPDATED                    notification: the key was set
    KEY_DELETED                    notification: the key was deleted
    PREFIX_CHANGED                 notification: a key with this prefix was set or deleted

Delivery (:mod:`~zmqgrad.wire.messages.delivery`), worker to worker::

    HELLO                          reserved and never sent: every envelope identifies its sender
    GOODBYE                        the last message: the sender leaves, or has declared the receiver lost
    ARENA_OFFER                    shared memory to map, with its descriptor
    LARGE_MESSAGE                  a message whose first frame was sent in chunks
    RELEASE                        releases the shared-memory blocks listed in the manifest
    CREDIT                         its envelope tells how much was consumed
    CREDIT_WANTED                  the sender is out of credit: send CREDIT after this many bytes
    CHUNK                          part of a large frame, ahead of its message
    ACK                            acknowledges messages up to a number, by the envelope alone
    BULK_OPEN                      opens a channel for sealed records -> BULK_READY
    BULK_READY                     reply: where to connect it, or why it cannot be
    BULK_ACK                       acknowledges the records of a channel up to a number

Commits (:mod:`~zmqgrad.wire.messages.commits`), agent to agent::

    COMMIT_COPY                    keep this part of a commit -> COMMIT_KEPT
    COMMIT_KEPT                    reply: it is here, or why it is not
    COMMIT_FETCH                   send a part of a commit -> COMMIT_FETCHED
    COMMIT_FETCHED                 reply: the part, or why it is not here
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
    GroupReport,
    PassOptions,
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
from zmqgrad.wire.messages.commits import (
    CommitCopy,
    CommitFetch,
    CommitFetched,
    CommitId,
    CommitKept,
    PartId,
)
from zmqgrad.wire.messages.delivery import (
    Ack,
    ArenaOffer,
    BulkAck,
    BulkOpen,
    BulkReady,
    Chunk,
    Credit,
    CreditWanted,
    FrameBuffer,
    FrameSlice,
    Goodbye,
    Hello,
    LargeMessage,
    Manifest,
    Release,
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
