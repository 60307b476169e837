"""infra/iam against cfn-lint's IAM rules: AWS's own list of actions, and which resources each can be limited to."""

import copy
import json

import pytest

from tests.infra.filled import policy

cfnlint = pytest.importorskip("cfnlint", reason="needs cfn-lint: pip install -e '.[dev]'")

IDENTITY = ("head", "storage", "prices")
READING = ("ec2:Describe", "pricing:Get")  # know no resources


def findings(policies, trust):
    """What cfn-lint says, informational rules included, of each policy as a managed policy of one template."""
    from cfnlint.config import ManualArgs

    resources = {
        name: {"Type": "AWS::IAM::ManagedPolicy", "Properties": {"PolicyDocument": document}}
        for name, document in policies.items()
    }
    resources["trust"] = {"Type": "AWS::IAM::Role", "Properties": {"AssumeRolePolicyDocument": trust}}
    template = json.dumps({"AWSTemplateFormatVersion": "2010-09-09", "Resources": resources}, indent=1)
    matches = cfnlint.lint(template, config=ManualArgs(regions=["us-east-1"], include_checks=["I"]))
    return [(list(m.path or ["", ""])[1], f"{m.rule.id} {m.message[:120]}") for m in matches]


def test_policies_and_the_linter_itself():
    """The policies have no finding; the same with a typing error, a wrong resource and a wrong key have three."""
    policies = {name: policy(name) for name in IDENTITY}
    broken = copy.deepcopy(policies)
    statements = {s["Sid"]: s for s in broken["head"]["Statement"]}
    statements["SeeTheClustersNodes"]["Action"].append("ec2:DescribeInstanzes")
    statements["GiveWorkersTheirRoleAndNoOther"]["Resource"] = "arn:aws:s3:::bucket"
    broken["storage"]["Statement"][0]["Effekt"] = "Allow"
    # One call: reading its rules is most of what it does.
    found = findings({**policies, **{f"{name}Broken": b for name, b in broken.items()}}, policy("trust"))
    assert [(where, what) for where, what in found if not where.endswith("Broken")] == []
    wrong = " ".join(what for _, what in found)
    assert "describeinstanzes" in wrong
    assert "iam:PassRole" in wrong
    assert "Effekt" in wrong


def test_nothing_is_wider_than_it_must_be_and_nobody_deletes_or_changes_who_may_what():
    granted = set()
    for statement in (s for name in IDENTITY for s in policy(name)["Statement"]):
        assert statement["Effect"] == "Allow"
        actions = [statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"]
        granted.update(actions)
        assert not any("*" in action or "Delete" in action for action in actions), statement["Sid"]
        if statement["Resource"] == "*":
            assert all(action.startswith(READING) for action in actions), statement["Sid"]
        if "s3:PutObject" in actions:  # documents are read-only
            assert statement["Resource"] == "arn:aws:s3:::my-results/raypd/*"
    assert {a for a in granted if a.startswith(("iam:", "sts:"))} == {"iam:PassRole"}
    assert {a for a in granted if a.startswith("s3:")} == {
        "s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"
    }  # fmt: skip
