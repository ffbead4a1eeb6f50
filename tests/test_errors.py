from bpfed.errors import UserError, unknown


def test_unknown_name_suggests_the_nearest():
    error = unknown("method", "bpfd", ["bpfed", "fedavg"])
    assert isinstance(error, UserError)
    assert "did you mean 'bpfed'?" in str(error)


def test_unknown_name_without_a_near_one_lists_all():
    assert "bpfed, fedavg" in str(unknown("method", "zzzz", ["fedavg", "bpfed"]))
