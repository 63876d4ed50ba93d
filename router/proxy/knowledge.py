"""What is known of a prompt before it is sent: what each rank holds of it, and where its session was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from router.core.seen import SeenPrefixes
from router.fleet.fleet import Fleet
from router.proxy.prepared import BYTES_A_TOKEN, PreparedRequest
from router.wire.text_keys import text_bytes


class Knowledge:
    """Of prompts by their tokens, from the indexes; by their text alone, from what has been sent where."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._seen: dict[str, SeenPrefixes] = {}

    def reusable(self, prepared: PreparedRequest) -> Mapping[int, int]:
        """Tokens of the prompt that each rank would reuse; ranks that have none of it may be left out."""
        reusable: dict[int, int] = {}
        if prepared.tokens is None:
            most = prepared.prompt_tokens - 1
            for slot, blocks in self._fleet.texts.blocks_sent(prepared.text_keys or ()).items():
                reusable[slot] = min(most, text_bytes(blocks) // BYTES_A_TOKEN)
            if self._fleet.shared.is_shared:
                for home, sent in self._sent_elsewhere(prepared):
                    reusable[home] = max(reusable.get(home, 0), min(most, sent))
            return reusable
        for index in self._fleet.indexes(prepared.model):
            keys = prepared.keys(index.block_tokens)
            found = index.reusable_tokens(
                keys, prompt_tokens=prepared.prompt_tokens, want=prepared.want, tokens=prepared.tokens
            )
            reusable.update(found)
        return reusable

    def loadable(self, prepared: PreparedRequest) -> Mapping[int, int]:
        """The same where what lower tiers hold counts as well; nothing where there are none."""
        loadable: dict[int, int] = {}
        if prepared.tokens is not None:
            for index in self._fleet.indexes(prepared.model):
                keys = prepared.keys(index.block_tokens)
                found = index.loadable_tokens(keys, prompt_tokens=prepared.prompt_tokens, tokens=prepared.tokens)
                loadable.update(found)
        return loadable

    def home(self, prepared: PreparedRequest, reusable: Mapping[int, int], known: int | None) -> int | None:
        """The rank that is known for the session's home, or another that holds more of it.

        After a restart, or with the shared state gone, this router does not know where a session was. What a rank holds
        of a prompt that neither this router has sent anywhere nor other conversations go on from is its past.
        """
        if prepared.tokens is None:
            return known
        known_tokens = 0 if known is None else reusable.get(known, 0)
        most_tokens = max(reusable.values(), default=0)
        if most_tokens <= max(known_tokens, prepared.ideal_tokens):
            return known
        if most_tokens <= self.common(prepared):
            return known
        return max(reusable, key=reusable.__getitem__)

    def stored(self, prepared: PreparedRequest) -> Mapping[int, int]:
        """Tokens of the prompt that full attention finds on each rank; nothing where there are no other layers."""
        stored: dict[int, int] = {}
        if prepared.tokens is not None:
            for index in self._fleet.indexes(prepared.model):
                keys = prepared.keys(index.block_tokens)
                stored.update(index.stored_tokens(keys, prompt_tokens=prepared.prompt_tokens))
        return stored

    def common(self, prepared: PreparedRequest) -> int:
        """Tokens of the prompt, keyed by tokens, that are of other conversations as well."""
        return max(
            index.shared_tokens(prepared.keys(index.block_tokens), prompt_tokens=prepared.prompt_tokens)
            for index in self._fleet.indexes(prepared.model)
        )

    def know_ideal(self, prepared: PreparedRequest) -> None:
        """Note the tokens of the prompt that an endless cache shared by all ranks would have."""
        block_tokens = self._smallest_block_tokens(prepared)
        if block_tokens and (earlier := self._seen.get(prepared.model)) is not None:
            blocks = earlier.blocks_seen(prepared.keys(block_tokens))
            prepared.ideal_tokens = min(blocks, max(0, prepared.prompt_tokens - 1) // block_tokens) * block_tokens

    def remember(self, prepared: PreparedRequest) -> None:
        """The prompt has been asked for."""
        if block_tokens := self._smallest_block_tokens(prepared):
            self._seen.setdefault(prepared.model, SeenPrefixes()).add(prepared.keys(block_tokens))

    def _sent_elsewhere(self, prepared: PreparedRequest) -> Iterator[tuple[int, int]]:
        """Where another replica sent the session, with the tokens of its prompt then: text unseen here."""
        model, session, fleet = prepared.model, prepared.session, self._fleet
        if session is None:
            return
        for is_prefill in {False, fleet.view.is_disaggregated}:
            shared = fleet.shared.home(model, session, is_prefill=is_prefill)
            if shared is not None and not shared.is_own:
                home = fleet.home(model, session, now=fleet.clock(), is_prefill=is_prefill)
                if home is not None:
                    yield home, shared.prompt_tokens

    def _smallest_block_tokens(self, prepared: PreparedRequest) -> int:
        """Of the model's ranks; 0 where there is none, or no tokens to put into blocks."""
        if prepared.tokens is None:
            return 0
        return min((index.block_tokens for index in self._fleet.indexes(prepared.model)), default=0)
