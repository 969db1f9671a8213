"""Every exception that swarm raises on purpose.

    SwarmError
    ├── UserError                 the person's mistake: one line, the next thing to try, exit code 2
    │   ├── UnsupportedModel      a GGUF file we cannot serve correctly
    │   └── EngineUnavailable     no usable llama.cpp library on this machine
    ├── NotAgreed                 the person was asked and said no; nothing was done
    ├── LocalProtocolError        ours: a message that we must not send now
    ├── RemoteProtocolError       theirs: bytes or behaviour outside the protocol
    │   ├── VersionRefused        no wire version in common
    │   ├── IdentityMismatch      the node at that address is not the one that was expected
    │   └── ExpertsNotHeld        a dispatch for experts that this peer does not hold (now): a view that is out of date
    ├── RemoteRefused             theirs, and legal: the other side answered with an error frame
    ├── Refused                   ours, and legal: a request that we do not grant, in words meant for whoever asked
    │   └── Leaving               this node takes nothing new
    ├── NetworkError              nobody's: unreachable, late, closed
    │   ├── ConnectionLost
    │   ├── DeadlineExceeded
    │   └── SourceUnusable        a web server that will not give the file, however often it is asked
    ├── IntegrityError            bytes on disk or from a source do not match their hash
    ├── ExpertUnavailable         no live holder answered for some experts of a layer
    ├── AuditFailed               a peer was caught after its wrong numbers had gone into what was sent already
    ├── EngineError               llama.cpp refused or failed
    └── Overloaded                a bounded queue is full: try again later

A message reads *what happened: got X, expected Y*. The values are attributes of the exception too.
"""

from __future__ import annotations

from collections.abc import Sequence


class SwarmError(Exception):
    """Root of the tree."""


class UserError(SwarmError):
    """A mistake that the person at the command line can mend; the message says how."""


class UnsupportedModel(UserError):
    """This GGUF file cannot be served correctly; the message names what is missing."""


class EngineUnavailable(UserError):
    """No llama.cpp library that fits is installed; the message names the package to install."""


class NotAgreed(SwarmError):
    """A person was asked whether to go on, and said no."""


class LocalProtocolError(SwarmError):
    """We tried to send something that the protocol forbids in this state: a bug of ours."""


class RemoteProtocolError(SwarmError):
    """The other side broke the protocol. The only error that bytes from the network can raise.

    Attributes:
        code: the wire error code that tells the other side why the link closes. Codes are never reused.
    """

    code = 0x01


class VersionRefused(RemoteProtocolError):
    """The two sides have no wire version in common."""

    code = 0x02


class IdentityMismatch(RemoteProtocolError):
    """The key that was presented is not the expected node's."""

    code = 0x03


class ExpertsNotHeld(RemoteProtocolError):
    """A dispatch names experts outside this peer's slice. A backbone with an old view does so in good faith."""


class RemoteRefused(SwarmError):
    """The other side answered a request with an error frame.

    Attributes:
        remote_code: the `ErrorCode` number that came over the wire.
        retry_after_s: when the other side wants to be asked again, seconds; None: it did not say.
    """

    def __init__(self, message: str, *, remote_code: int, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.remote_code = remote_code
        self.retry_after_s = retry_after_s


class Refused(SwarmError):
    """We do not grant another node's request. Its message is sent to that node: no paths, nothing else of this machine."""


class Leaving(Refused):
    """This node is leaving: it finishes what it has and takes nothing new."""


class NetworkError(SwarmError):
    """The network failed; neither side is known to be at fault."""


class ConnectionLost(NetworkError):
    """The connection closed or went silent."""


class DeadlineExceeded(NetworkError):
    """An answer did not come in time."""


class SourceUnusable(NetworkError):
    """A web source does not have the file, does not give it to us, or gives another one now."""


class IntegrityError(SwarmError):
    """Bytes do not match the hash that the manifest gives for them."""


class ExpertUnavailable(SwarmError):
    """No live holder answered for some experts.

    Attributes:
        layer: the N of `blk.N`.
        experts: global expert ids, ascending.
    """

    def __init__(self, layer: int, experts: Sequence[int], reason: str) -> None:
        self.layer = layer
        self.experts = tuple(experts)
        self.reason = reason
        shown = ", ".join(map(str, self.experts[:16])) + (", ..." if len(self.experts) > 16 else "")
        super().__init__(f"no answer for layer {layer}, experts {shown}: {reason}")


class AuditFailed(SwarmError):
    """A peer was caught returning wrong numbers, and what they went into has been sent to the client already.

    Attributes:
        n_audited: tokens of the answer, from its first on, that do not depend on that peer's unaudited numbers.
    """

    def __init__(self, n_audited: int) -> None:
        self.n_audited = n_audited
        last = f"the last audited token of this answer is number {n_audited}" if n_audited else "no token is audited"
        super().__init__(f"a peer returned wrong numbers and is used no more; {last}: ask again")


class EngineError(SwarmError):
    """llama.cpp returned a failure."""


class Overloaded(SwarmError):
    """A bounded queue is full.

    Attributes:
        retry_after_s: a hint, in seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
