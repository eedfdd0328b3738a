"""What tests of engine share with others."""


def same_up_to_ties(found: list[int], wanted: list[int], margins: list[float]) -> None:
    for ours, theirs, margin in zip(found, wanted, margins, strict=True):
        if margin < 1e-3:
            return
        assert ours == theirs
