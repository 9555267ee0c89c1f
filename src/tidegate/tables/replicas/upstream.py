"""What a replica knows of the live side of its partition: who leads, from where on, and how far the effects go.

It is part of the partition's commit, beside rows, offset and the drainer's validation state: all four are of one
moment. Bytes: msgpack of `Upstream` as an array.

U1  it is a function of the version topic up to the replica's position, and of nothing else: every replica that has
    drained up to an offset knows the same.
U2  a state that came in parts counts when all of them are there, in their order; until then, and for ever where its
    leader was replaced before, what was known last counts.
U3  `next_offset` never goes back. All records of the live topic before it that should be in the table are; none from it
    on is.

Thread rule: values and pure functions.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from tidegate.errors import CorruptError
from tidegate.integrity.control_records import Leadership, TopicSwitch

VERSION: Final = 2
_READABLE: Final = (1, VERSION)
"""Version 1 knows nothing of topic ids and parts of states: its last three fields are not there."""
NONE: Final = -1


class Upstream(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Empty before the first leader; without `topic` before the first topic switch."""

    version: int = VERSION
    epoch: int = 0
    guid: bytes = b""
    stamp_offset: int = NONE
    """Where the leader's stamp is in the version topic."""
    topic: str = ""
    start_ms: int = NONE
    start_offset: int = NONE
    """Where in the live topic its first leader began."""
    next_offset: int = NONE
    """The next record of the live topic that is not in the table yet."""
    state_offset: int = NONE
    """Up to where in the live topic `state` says what is known of its producers."""
    state: bytes = b""
    copied: int = 0
    """Records of the live topic that the table took."""
    topic_id: str = ""
    """Of the live topic that offsets count in; empty where it is not known."""
    unfinished: tuple[int, int, int] = (0, 0, 0)
    """Generation, offset and parts of a state of which not all parts came yet."""
    parts: tuple[bytes, ...] = ()
    """Those of its parts that came."""

    @property
    def leadership(self) -> Leadership:
        return Leadership(self.epoch, self.guid)

    @property
    def is_switched(self) -> bool:
        return self.topic != ""

    def led_by(self, leadership: Leadership, stamp_offset: int) -> Upstream:
        """After a stamp that counts."""
        return replace(self, epoch=leadership.epoch, guid=leadership.guid, stamp_offset=stamp_offset)

    def switched(self, switch: TopicSwitch) -> Upstream:
        """After a topic switch: the first one names the topic, every one says how far it was read (U2)."""
        known = replace(self, unfinished=(0, 0, 0), parts=()) if self.parts else self
        if switch.parts > 1:
            unfinished = (switch.generation, switch.offset, switch.parts)
            came = self.parts if self.unfinished == unfinished else ()
            if switch.part != len(came):
                return known  # a part before it is not there: none of this state is of use
            came = (*came, switch.state)
            if len(came) < switch.parts:
                return replace(self, unfinished=unfinished, parts=came)
            switch = switch._replace(state=b"".join(came))
        if not self.is_switched:
            return replace(
                known,
                topic=switch.topic,
                start_ms=switch.start_ms,
                start_offset=switch.offset,
                next_offset=max(self.next_offset, switch.offset),
                state_offset=switch.offset,
                state=switch.state,
                topic_id=switch.topic_id,
            )
        if switch.topic != self.topic or switch.offset < self.state_offset:
            return known  # no leader writes that; the first switch stands
        return replace(
            known,
            next_offset=max(self.next_offset, switch.offset),
            state_offset=switch.offset,
            state=switch.state,
            topic_id=self.topic_id or switch.topic_id,
        )

    def reached(self, next_offset: int, copied: int) -> Upstream:
        """After `copied` records of the live topic, the last of them just before `next_offset`."""
        return replace(self, next_offset=max(self.next_offset, next_offset), copied=self.copied + copied)


def encode_upstream(upstream: Upstream) -> bytes:
    return b"" if upstream == Upstream() else msgspec.msgpack.encode(upstream)


def decode_upstream(data: bytes, place: str) -> Upstream:
    """What a commit says; `place` is for the error."""
    if not data:
        return Upstream()
    try:
        found = msgspec.msgpack.decode(data, type=Upstream)
    except msgspec.DecodeError as error:
        raise CorruptError(
            f"what {place} knows of its live topic cannot be read ({error}); delete this replica's state and let it "
            "drain the version topic anew"
        ) from None
    if found.version not in _READABLE:
        raise CorruptError(
            f"{place} was written by another release (version {found.version}, this one reads up to {VERSION}); delete "
            "this replica's state and let it drain the version topic anew"
        )
    return replace(found, version=VERSION)
