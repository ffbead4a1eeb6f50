from bpfed._util.errors import UserError, hint, unknown


def test_unknown_name_suggests_the_nearest():
    error = unknown("method", "bpfd", ["bpfed", "fedavg"])
    assert isinstance(error, UserError)
    assert "did you mean 'bpfed'?" in str(error)


def test_unknown_name_without_a_near_one_lists_all():
    assert "bpfed, fedavg" in str(unknown("method", "zzzz", ["fedavg", "bpfed"]))


def test_a_name_in_other_letters_or_broken_off_is_found():
    assert hint("VA", ["va", "vb"]) == "did you mean 'va'?"
    assert hint("h0", ["h30", "h00", "h01"]) == "did you mean 'h00'?"
