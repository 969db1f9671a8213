"""How long the answer to a request over a TLS link may take before it is asked elsewhere as well. Pure.

    asked(size) -> (late after, overdue after)      answered(size, seconds)

TCP repairs the loss of a last packet after 200 ms at the earliest, and a path that is cut says nothing. So an answer is *late*
once it takes longer than its like have: then a copy of a small request goes over the other link, within a budget. It is *overdue*
once it takes so long that only a loss or a very busy peer explain it: then it is asked elsewhere in any case, unless the stream
moves (a pong to a ping that was sent meanwhile says that nothing is lost and the peer is slow).
"""

from __future__ import annotations

from swarm.wire import messages as m

# An answer is late after mean + 2 deviations of what answers to as much work took (TCP repairs its last packets later), and no
# earlier than LEAST_LATE_S after the mean. At 1 % loss and 0.2 to 3 ms it makes p99 of 205 ms 11 with 4 deviations and 3 ms.
N_DEVIATIONS, LEAST_LATE_S = 2, 0.0015
# Copies of what is late are of small requests, and this share of all, saved up to a burst: a peer that is busy must not get its
# work twice.
COPY_SHARE, COPY_BURST = 0.1, 8.0
# Times the mean, or seconds after it (TCP's least retransmission timeout): then it is overdue.
MOST_LATE, MOST_LATE_S = 3.0, 0.2
UNSEEN_S = 0.5  # late, before anything like it was answered; guessed
RTT_GAIN, _DEVIATION_GAIN = 0.125, 0.25  # RFC 6298's


class Patience:
    """What one link's answers took.

    Attributes:
        n_copies: of late requests that may be sent now.
    """

    def __init__(self) -> None:
        """Nothing was answered yet."""
        self.n_copies = COPY_BURST
        self._service: dict[int, tuple[float, float]] = {}  # size of work -> mean and deviation of its answers' seconds

    def asked(self, size: int) -> tuple[float, float]:
        """Return the seconds after which the answer to so much work is late, and overdue; a share of a copy is saved up."""
        self.n_copies = min(COPY_BURST, self.n_copies + COPY_SHARE)
        known = self._service.get(size)
        if known is None:
            return UNSEEN_S, UNSEEN_S
        mean_s, deviation_s = known
        overdue_s = max(MOST_LATE * mean_s, mean_s + MOST_LATE_S)
        return min(overdue_s, mean_s + max(LEAST_LATE_S, N_DEVIATIONS * deviation_s)), overdue_s

    def answered(self, size: int, taken_s: float) -> None:
        """Note what an answer took."""
        known = self._service.get(size)
        if known is None:
            self._service[size] = taken_s, taken_s / 2
            return
        mean_s, deviation_s = known
        deviation_s += _DEVIATION_GAIN * (abs(taken_s - mean_s) - deviation_s)
        self._service[size] = mean_s + RTT_GAIN * (taken_s - mean_s), deviation_s


def size_of(message: m.Request) -> int:
    """Return the order of magnitude of a request's work, by powers of two."""
    return len(message.expert_ids).bit_length() if isinstance(message, m.Dispatch) else 0
