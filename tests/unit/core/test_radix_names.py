"""Removals of a radix cache that keeps equal texts apart, under names that do not."""

from __future__ import annotations

from router.core.index import PrefixIndex
from router.core.radix_pool import RadixPool
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockRemoved, BlockStored

HEAD = [1, 2, 3]
PLAIN = [*HEAD, 4, 5]
TENANT = [*HEAD, 6, 7]
SEED = namespace_seed("", "tenant")


def names(tokens: list[int]) -> tuple[int, ...]:
    """An engine's: of the text alone."""
    return tuple(block_keys(tokens, block_tokens=1, parent=namespace_seed("", "")))


def served(index: PrefixIndex, tokens: list[int], *, seed: int | None = None) -> list[int]:
    """A prompt was sent and stored whole. Returns its keys."""
    plain = block_keys(tokens, block_tokens=1, parent=namespace_seed("", ""))
    own = plain if seed is None else block_keys(tokens, block_tokens=1, parent=seed)
    index.namespaces.learn(plain, own, seed=0 if seed is None else seed)
    ticket = index.promise(0, own, prompt_tokens=len(tokens) + 1)
    index.apply(0, BlockStored(names(tokens), None, tokens, 1))
    index.provisional.settle()
    index.provisional.drop(ticket)
    return own


def test_what_goes_of_one_text_is_what_nothing_is_behind_however_its_nodes_are_named() -> None:
    """The tenant's answer goes, then its prompt: one event names both, the answer first and each from its start. The
    plain head is not theirs, though it has the names of the prompt's first three blocks.
    """
    index = PrefixIndex(block_tokens=1)
    index.add_rank(0, domain="engine", pool=RadixPool(30, page_tokens=1))
    plain, tenant = served(index, PLAIN), served(index, TENANT, seed=SEED)
    answered = [*TENANT, 8, 9]
    index.apply(0, BlockStored(names(answered)[5:], names(TENANT)[-1], answered[5:], 1))

    index.apply(0, BlockRemoved((*names(answered)[5:], *names(TENANT))))

    assert index.reusable_tokens(plain, prompt_tokens=6) == {0: 5}
    assert index.reusable_tokens(tenant, prompt_tokens=6) == {}


def test_an_event_of_several_nodes_is_put_in_the_order_of_their_chain() -> None:
    """Two nodes behind a third that itself is behind a fork: in whatever pieces the names are known."""
    index = PrefixIndex(block_tokens=1)
    index.add_rank(0, domain="engine", pool=RadixPool(30, page_tokens=1))
    trunk = list(range(10, 18))
    index.apply(0, BlockStored(names(trunk), None, trunk, 1))
    fork = [*trunk[:4], 30, 31, 32]
    index.apply(0, BlockStored(names(fork)[4:], names(fork)[3], fork[4:], 1))
    n, f = names(trunk), names(fork)

    def ordered(*told: int) -> list[int | bytes]:
        return list(index._ranks[0].names.in_chain_order(told, index._runs))

    assert ordered(*n) == [*n]
    assert ordered(*n[6:], *n[4:6]) == [*n[4:6], *n[6:]]
    assert ordered(*f[5:], *f[3:5], *n[4:], *n[:3]) == [*n[:3], *n[4:], *f[3:5], *f[5:]]
    assert ordered(99, *f[2:]) == [*f[2:], 99]


def test_the_namespace_of_a_prompt_that_nobody_has_heard_of_is_not_forgotten() -> None:
    """SGLang is promised nothing before a prompt's first token: that it was sent is what its pool knows. Names are let
    go of meanwhile, as after a reset.
    """
    index = PrefixIndex(block_tokens=1)
    index.add_rank(0, domain="engine", pool=RadixPool(30, page_tokens=1))
    plain = block_keys(TENANT, block_tokens=1, parent=namespace_seed("", ""))
    own = block_keys(TENANT, block_tokens=1, parent=SEED)
    index.namespaces.learn(plain, own, seed=SEED)
    pool = index.pool(0)
    assert isinstance(pool, RadixPool)
    pool.sent(own, blocks=len(own) + 1)
    index.sweep()

    index.apply(0, BlockStored(names(TENANT), None, TENANT, 1))

    assert index.reusable_tokens(own, prompt_tokens=6) == {0: 5}
    assert index.reusable_tokens(plain, prompt_tokens=6) == {}
