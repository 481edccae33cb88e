"""Hypothesis strategies for what the store is given."""

from hypothesis import strategies as st

from kvstore.namespace import Layout, Namespace, SectionSpec
from kvstore.prefix_hash import ImageSpan

_NAMES = st.text(min_size=1, max_size=24)


@st.composite
def layouts(draw: st.DrawFn, row_bytes_max: int = 64) -> Layout:
    """Layouts of one to six caches whose ratios divide the block."""
    block_tokens = draw(st.sampled_from([1, 2, 4, 6, 8, 12, 256]))
    ratios = [r for r in (1, 2, 3, 4, 6, 8) if block_tokens % r == 0]
    caches = draw(
        st.lists(
            st.tuples(st.integers(0, 60), st.sampled_from(["main", "index"])),
            min_size=1,
            max_size=6,
            unique=True,
        )
    )
    return Layout(
        tuple(
            SectionSpec(
                layer,
                "main" if role == "main" else "index",
                draw(st.sampled_from(ratios)),
                draw(st.integers(1, row_bytes_max)),
            )
            for layer, role in caches
        ),
        block_tokens,
    )


@st.composite
def namespaces(draw: st.DrawFn, tenants: bool = True) -> Namespace:
    """Namespaces of any model, revision and layout; some with a tenant."""
    tenant = draw(st.just("") | _NAMES) if tenants else ""
    return Namespace(draw(_NAMES), draw(_NAMES), draw(layouts()), tenant)


token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=64)
"""Token ids that a u32 holds."""


@st.composite
def image_spans(draw: st.DrawFn, tokens: int) -> list[ImageSpan]:
    """Images in a prompt of `tokens` tokens, in order, none overlapping another."""
    cuts = sorted(draw(st.sets(st.integers(0, tokens), max_size=8)))
    return [
        ImageSpan(start, stop - start, draw(st.binary(min_size=32, max_size=32)))
        for start, stop in zip(cuts[::2], cuts[1::2], strict=False)
    ]
