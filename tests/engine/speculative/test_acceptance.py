from headrace.engine.speculative.acceptance import KeptRate


def test_nothing_seen_is_the_prior():
    assert KeptRate().chance(0.3, 5.0) == 0.3


def test_what_is_seen_replaces_the_prior_and_fades():
    rate = KeptRate()
    for _ in range(200):
        rate.add(is_kept=True)
    assert rate.chance(0.3, 2.0) > 0.95
    for _ in range(200):
        rate.add(is_kept=False)
    assert rate.chance(0.3, 2.0) < 0.05
