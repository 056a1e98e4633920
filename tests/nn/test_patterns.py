"""Regular expressions that ``re`` itself stumbles over get the error of any other bad one."""

import pytest

from torch_epilora.nn.patterns import as_patterns


@pytest.mark.parametrize("regex", ["(" * 5000 + "a" + ")" * 5000, "a{99999999999999999999}", "(a"])
def test_what_does_not_compile(regex):
    with pytest.raises(ValueError, match=r"targets: 're:[(a].* is not a regular expression") as e:
        as_patterns("targets", ["q_proj", "re:" + regex])
    assert len(str(e.value)) < 300
