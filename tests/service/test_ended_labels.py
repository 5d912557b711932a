from headrace.service.ended_labels import EndedLabels


def test_the_latest_ones_are_remembered() -> None:
    labels = EndedLabels(2)
    for label in ("a", "b", "a", "c"):
        labels.add(label)
    assert [label in labels for label in ("a", "b", "c")] == [True, False, True]
