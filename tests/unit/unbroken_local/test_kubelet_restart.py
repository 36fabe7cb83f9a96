"""Pauses before restarts."""

from unbroken_local.kubelet.restart import BackOff, exit_code_of


def test_the_first_restart_is_at_once_and_pauses_double_up_to_the_limit() -> None:
    back_off = BackOff(base_s=10, limit_s=300)
    assert [back_off.pause_s(n) for n in range(1, 9)] == [0, 10, 20, 40, 80, 160, 300, 300]
    assert back_off.pause_s(10**6) == 300


def test_a_signal_shows_as_128_plus_its_number() -> None:
    assert [exit_code_of(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]
