"""A corpus is known by its hash, and a split deals its documents out the same for ever."""

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerjump.data.corpus import Corpus, split_indices
from layerjump.errors import BadText, TextTooShort


def test_the_hash_is_of_the_documents_alone_and_knows_where_they_end():
    corpus = Corpus("a", ("ab", "c"), "")
    by_hand = hashlib.sha256(bytes(7) + b"\x02ab" + bytes(7) + b"\x01c").hexdigest()
    assert corpus.sha256 == by_hand == Corpus("b", ("ab", "c"), "other").sha256
    others = [("a", "bc"), ("abc",), ("c", "ab"), ("ab", "c", "")]
    assert by_hand not in [Corpus("a", documents, "").sha256 for documents in others]


def parts(splits):
    return splits.fit, splits.validation, splits.test


@given(st.integers(3, 300), st.integers(0, 5), st.sampled_from(["80/10/10", "98/1/1", "34/33/33"]))
def test_percentages_deal_every_document_once(n, seed, split):
    dealt = parts(split_indices(n, split, seed=seed))
    assert sorted(itertools.chain(*dealt)) == list(range(n))
    assert all(dealt)
    shares = [float(size) / 100 for size in split.split("/")]
    off = [abs(len(part) - share * n) for part, share in zip(dealt, shares, strict=True)]
    assert max(off) <= 2


def test_split_sizes():
    def lengths(*arguments):
        return [len(part) for part in parts(split_indices(*arguments))]

    assert lengths(1000) == [800, 100, 100]
    assert lengths(10_000, "9000/500/500") == [9000, 500, 500]
    assert lengths(10_000, (9000, 0, 1000)) == [9000, 0, 1000]
    assert lengths(3000, (99.8, 0.1, 0.1)) == [2994, 3, 3]
    assert lengths(11, "0/50/50") == [0, 6, 5]
    assert lengths(100, "7/5/3") == [7, 5, 3]


def test_a_split_is_the_same_for_ever():
    # If this fails, numbers published with seed 0 can no longer be reproduced.
    assert parts(split_indices(8, "4/2/2")) == ((3, 2, 1, 6), (0, 7), (4, 5))
    assert split_indices(100, seed=1) != split_indices(100) == split_indices(100, seed=0)


@pytest.mark.parametrize(
    ("n", "split", "kind", "said"),
    [
        (2, "80/10/10", TextTooShort, "got 2"),
        (9, "8/1/1", TextTooShort, "8/1/1"),
        (9, "80/20", BadText, "'80/20'"),
        (9, "a/b/c", BadText, "'a/b/c'"),
        (9, "-10/100/10", BadText, "-10/100/10"),
        (9, "0/0/0", BadText, "0/0/0"),
        (9, "nan/1/1", BadText, "nan/1/1"),
        (9, (0.8, 0.1, 0.1), BadText, "0.8/0.1/0.1"),
    ],
)
def test_splits_that_cannot_be(n, split, kind, said):
    with pytest.raises(BadText) as caught:
        split_indices(n, split)
    assert type(caught.value) is kind
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_negative_seed():
    with pytest.raises(BadText, match="seed of 0 or more, got -1"):
        split_indices(10, seed=-1)
