"""Speculative sampling emits the target's law, in closed form and on samples (spec.md section 8)."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from draftconf.reference.loss import lk_loss, target_log_probs
from draftconf.reference.sampling import acceptance, inverse_cdf, residual_law, speculative_chain, speculative_sample

EPS = 2.0**-52


def laws(size: int, parts: int) -> np.ndarray:
    """Every law on ``size`` tokens with probabilities that are multiples of 1 / parts. [n, size]."""
    counts = [c for c in itertools.product(range(parts + 1), repeat=size) if sum(c) == parts]
    return np.array(counts) / parts


@pytest.mark.parametrize(("size", "parts"), [(1, 1), (2, 16), (3, 8), (4, 6), (5, 4), (6, 4)])
def test_the_emitted_law_is_the_target_s_for_all_pairs_of_laws(size, parts):
    """sum_x q_x a_x [x = t] + (1 - alpha) r_t = p_t, with alpha = sum q a = sum min(p, q)."""
    for p, q in itertools.product(laws(size, parts), repeat=2):
        accepted, residual = q * acceptance(p, q), residual_law(p, q)
        alpha = accepted.sum()
        assert abs(alpha - np.minimum(p, q).sum()) <= 4 * EPS
        assert np.abs(accepted + (1 - alpha) * residual - p).max() <= 4 * EPS
        assert abs(residual.sum() - 1) <= 4 * EPS
        assert (residual >= 0).all()


def test_the_emitted_law_is_exact_where_every_quotient_is():
    """Probabilities in eighths with quotients and residuals that float64 holds: compared as rationals."""
    exact = 0
    for p, q in itertools.product(laws(3, 8), repeat=2):
        terms = [*acceptance(p, q), *residual_law(p, q)]
        if all(Fraction(float(x)).denominator <= 64 for x in terms):
            exact += 1
            fp, fq, a, r = ([Fraction(float(x)) for x in v] for v in (p, q, acceptance(p, q), residual_law(p, q)))
            alpha = sum(x * y for x, y in zip(fq, a, strict=True))
            assert [x * y + (1 - alpha) * z for x, y, z in zip(fq, a, r, strict=True)] == fp
    assert exact > 500


def cells(count: int) -> list[float]:
    """The middles of ``count`` equal cells of [0, 1)."""
    return [(i + 0.5) / count for i in range(count)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_counting_all_draws_gives_exactly_the_target_s_law(size):
    """With probabilities in thirds every boundary of the three draws is a multiple of 1/3, 1/6 and 1/6."""
    draws = list(itertools.product(cells(3), cells(6), cells(6)))
    for p, q in itertools.product(laws(size, 3), repeat=2):
        counts = np.zeros(size, int)
        accepted = 0
        for draw in draws:
            sample = speculative_sample(p, q, np.array(draw))
            counts[sample.token] += 1
            accepted += sample.accepted
        assert counts.tolist() == np.rint(p * len(draws)).astype(int).tolist()
        assert accepted == round(np.minimum(p, q).sum() * len(draws))


# A chain of drafts over a table p(. | prefix) and q(. | prefix) of all prefixes


def table(size: int, length: int, parts: int, seed: int) -> dict:
    """A law for every prefix of up to ``length`` tokens."""
    rng, all_laws = np.random.default_rng(seed), laws(size, parts)
    prefixes = (x for n in range(length + 1) for x in itertools.product(range(size), repeat=n))
    return {prefix: all_laws[rng.integers(len(all_laws))] for prefix in prefixes}


def emitted_law(p: dict, q: dict, steps: int) -> dict:
    """The probability of every emitted sequence, from the acceptance and residual rules along every draft."""
    emitted: dict = {}

    def draft(prefix, mass):
        if len(prefix) == steps:  # all accepted: a bonus token from the target
            for x, p_x in enumerate(p[prefix]):
                emitted[*prefix, x] = emitted.get((*prefix, x), 0.0) + mass * p_x
            return
        a, r = acceptance(p[prefix], q[prefix]), residual_law(p[prefix], q[prefix])
        for x, q_x in enumerate(q[prefix]):
            draft((*prefix, x), mass * q_x * a[x])
            for y, r_y in enumerate(r):
                emitted[*prefix, y] = emitted.get((*prefix, y), 0.0) + mass * q_x * (1 - a[x]) * r_y

    draft((), 1.0)
    return emitted


def assert_conditionals_are_the_target_s(emitted: dict, p: dict, steps: int, size: int, tolerance: float) -> None:
    """Given the tokens before it, and that there is one, the next emitted token has the target's law."""
    for n in range(steps + 1):
        for prefix in itertools.product(range(size), repeat=n):
            mass = np.array([sum(w for s, w in emitted.items() if s[: n + 1] == (*prefix, x)) for x in range(size)])
            assert np.abs(mass - mass.sum() * p[prefix]).max() <= tolerance * max(mass.sum(), 1)


@pytest.mark.parametrize(("size", "steps"), [(2, 1), (2, 4), (3, 3), (4, 2), (6, 2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_token_of_a_chain_has_the_target_s_law_given_the_tokens_before_it(size, steps, seed):
    p, q = table(size, steps, 4, seed), table(size, steps, 4, seed + 100)
    emitted = emitted_law(p, q, steps)
    assert abs(sum(emitted.values()) - 1) <= 16 * EPS
    assert_conditionals_are_the_target_s(emitted, p, steps, size, 16 * EPS)


def test_counting_all_draws_of_a_chain_gives_exactly_the_law_of_the_closed_form():
    """``speculative_chain`` itself, two drafts and a bonus token, over every cell of its seven uniform numbers."""
    size, steps = 2, 2
    one = list(itertools.product(cells(3), cells(6), cells(6)))
    for seed in (3, 4):
        p, q = table(size, steps, 3, seed), table(size, steps, 3, seed + 50)
        counts: dict = {}
        for first, second, bonus in itertools.product(one, one, cells(3)):
            x = inverse_cdf(q[()], first[0])
            y = inverse_cdf(q[x,], second[0])
            draws = np.array([first, second, (bonus, 0.0, 0.0)])
            tokens = speculative_chain(np.stack([p[()], p[x,], p[x, y]]), np.stack([q[()], q[x,]]), draws)
            counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
        total = 3 * len(one) ** 2
        want = {tokens: round(mass * total) for tokens, mass in emitted_law(p, q, steps).items() if mass > 1e-9}
        assert counts == want
        assert_conditionals_are_the_target_s(counts, p, steps, size, 1e-12)


# Samples


@pytest.fixture(scope="module")
def samples():
    """200,000 tokens drawn for one pair of laws, some tokens shared, some almost on one side only."""
    rng = np.random.default_rng(2024)
    target, draft = rng.normal(0, 1.5, 12), rng.normal(0, 1.5, 12)
    p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (target, draft))
    drawn = [speculative_sample(p, q, draw) for draw in rng.random((200_000, 3))]
    return target, draft, p, np.array([s.token for s in drawn]), np.array([s.accepted for s in drawn])


def test_chi_square_of_200000_samples_against_the_target_s_law(samples):
    _, _, p, tokens, accepted = samples
    counts = np.bincount(tokens, minlength=len(p))
    assert len(tokens) == 200_000
    assert (200_000 * p).min() > 5
    assert stats.chisquare(counts, 200_000 * p).pvalue > 1e-3
    assert stats.chisquare(np.bincount(tokens[accepted], minlength=12), accepted.sum() * p).pvalue < 1e-9  # has power


def test_measured_acceptance_is_exp_of_minus_the_lk_loss_within_5_standard_errors(samples):
    target, draft, _, _, accepted = samples
    alpha = np.exp(-lk_loss(draft, target_log_probs(target)))
    assert 0.2 < alpha < 0.8
    assert abs(accepted.mean() - alpha) <= 5 * np.sqrt(alpha * (1 - alpha) / len(accepted))


# Edges

LAST = 1 - 2.0**-53  # the largest number below 1
EDGES = (0.0, 2.0**-53, 0.5, LAST)


@pytest.mark.parametrize("q", [[0.0, 0.25, 0.0, 0.75, 0.0], [0.5, 0.0, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
@pytest.mark.parametrize("p", [[0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4, 0.0]])
def test_a_token_of_no_probability_is_never_emitted_even_by_draws_at_the_edges(p, q):
    p, q = np.array(p), np.array(q)
    for draw in itertools.product(EDGES, repeat=3):
        sample = speculative_sample(p, q, np.array(draw))
        assert p[sample.token] > 0
        if sample.accepted:
            assert q[sample.token] > 0


@pytest.mark.parametrize(
    "law", [[0.0, 0.3, 0.7, 0.0], [0.1] * 10, [0.1] * 10 + [0.0], [1 / 3] * 3, [0.0, 1.0], [1e-300, 1.0, 0.0]]
)
def test_the_inverse_cdf_never_returns_a_token_of_no_probability(law):
    law = np.array(law)
    for u in (*EDGES, *np.cumsum(law)[:-1]):
        if u < 1:
            assert law[inverse_cdf(law, u)] > 0
    assert inverse_cdf(law, 0.0) == np.flatnonzero(law)[0]
    assert inverse_cdf(law, LAST) == np.flatnonzero(law > 1e-15)[-1]


@pytest.mark.parametrize("law", laws(3, 4).tolist())
def test_a_draft_equal_to_the_target_is_always_accepted(law):
    law = np.array(law)
    assert (acceptance(law, law) == 1).all()
    assert np.array_equal(residual_law(law, law), law)  # alpha = 1: p itself
    for draw in itertools.product(EDGES, repeat=3):
        sample = speculative_sample(law, law, np.array(draw))
        assert sample.accepted
        assert sample.token == inverse_cdf(law, draw[0])


def test_where_rounding_leaves_no_residual_it_is_the_target_s_law():
    p, q = np.array([0.5 - 2.0**-54, 0.5]), np.array([0.5, 0.5])
    assert np.array_equal(residual_law(p, q), p)


def test_acceptance_switches_exactly_at_p_over_q():
    p, q = np.array([0.25, 0.75]), np.array([0.5, 0.5])
    for u, accepted in ((0.0, True), (np.nextafter(0.5, 0), True), (0.5, False), (LAST, False)):
        sample = speculative_sample(p, q, np.array([0.0, u, 0.0]))
        assert sample.accepted == accepted
        assert sample.token == (0 if accepted else 1)
        assert sample.residual.tolist() == [0.0, 1.0]


def test_a_chain_stops_at_the_first_rejection_and_ends_in_a_bonus_token_after_the_last_acceptance():
    sure, other = np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.0, 0.0])
    bonus = np.array([0.0, 0.0, 1.0])
    draws = np.full((3, 3), 0.5)
    assert speculative_chain(np.stack([sure, sure, bonus]), np.stack([sure, sure]), draws) == [0, 0, 2]
    assert speculative_chain(np.stack([sure, other, bonus]), np.stack([sure, sure]), draws) == [0, 1]
    assert speculative_chain(np.stack([other, sure, bonus]), np.stack([sure, sure]), draws) == [1]


HALVES = np.array([0.5, 0.5])


@pytest.mark.parametrize(
    ("p", "q", "draw", "words"),
    [
        (HALVES * 1.1, HALVES, [0.1] * 3, "p is of sum 1.1"),
        (HALVES, np.array([1.5, -0.5]), [0.1] * 3, "q is negative at 1"),
        (HALVES, np.ones(1), [0.1] * 3, "q is of shape"),
        (HALVES[None], HALVES, [0.1] * 3, "p is of shape"),
        (HALVES, HALVES, [0.1, 0.2], "draw is"),
        (HALVES, HALVES, [0.1, 1.0, 0.2], "draw is"),
        (HALVES, HALVES, [-0.1, 0.0, 0.2], "draw is"),
        (HALVES, HALVES, [np.nan, 0.0, 0.2], "draw is"),
        (np.array([np.nan, 1.0]), HALVES, [0.1] * 3, "p is"),
    ],
    ids=str,
)
def test_what_is_no_law_or_no_draw_is_refused_by_name(p, q, draw, words):
    with pytest.raises(ValueError, match=words):
        speculative_sample(p, q, np.array(draw))
