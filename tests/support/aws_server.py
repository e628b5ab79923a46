"""Starts a moto server in this process, to which Terraform can apply a plan as to AWS.

moto shows that the calls exist and fit together, but not how AWS would answer them. Three things differ from plain
moto:
- `budgets` gets two calls that Terraform makes and moto 5.2.5 lacks.
- The versions of a key can be deleted from a bucket whose versioning is suspended, including delete markers.
- A statement of a bucket's policy that denies requests without TLS is ignored. moto uses HTTP and evaluates no
  condition, so it would deny everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from moto.backends import get_backend
from moto.budgets.responses import BudgetsResponse
from moto.iam.access_control import IAMPolicy, PermissionResult
from moto.s3.models import FakeBucket, FakeDeleteMarker
from moto.server import ThreadedMotoServer

USED = ("autoscaling", "budgets", "cloudwatch", "ec2", "iam", "kms", "rds", "s3", "secretsmanager", "sns", "ssm", "sts")


@contextmanager
def aws_server() -> Iterator[str]:
    """Start an empty moto server and yield its endpoint."""
    for service in USED:
        for account in get_backend(service).values():  # type: ignore[call-overload]
            for backend in account.values():
                backend.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeBucket, "get_permission", _get_permission)
        patch.setattr(BudgetsResponse, "describe_subscribers_for_notification", _describe_subscribers, raising=False)
        patch.setattr(BudgetsResponse, "list_tags_for_resource", _list_tags, raising=False)
        patch.setattr(FakeDeleteMarker, "dispose", lambda marker, garbage=False: None, raising=False)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


def variables(endpoint: str) -> dict[str, str]:
    """Return the environment with which Terraform and rollflow reach only this server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "2",
    }


def _get_permission(bucket: FakeBucket, action: str, resource: str) -> Any:
    """Evaluate a bucket's policy as for a request over TLS."""
    if bucket.policy is None:
        return PermissionResult.NEUTRAL
    policy = json.loads(bucket.policy)
    policy["Statement"] = [one for one in policy["Statement"] if not is_tls_only(one)]
    return IAMPolicy(json.dumps(policy)).is_action_permitted(action, resource)


def is_tls_only(statement: dict[str, Any]) -> bool:
    """Return whether a statement denies every request without TLS and no other request."""
    return (
        statement["Effect"] == "Deny"
        and statement["Principal"] in ("*", {"AWS": "*"})
        and statement["Action"] == "s3:*"
        and statement.get("Condition") == {"Bool": {"aws:SecureTransport": "false"}}
    )


def _describe_subscribers(response: BudgetsResponse) -> str:
    wanted = response._get_param("Notification")
    budget = response.backend.budgets[response._get_param("AccountId")][response._get_param("BudgetName")]
    for notification in budget.notifications:
        if wanted.items() <= notification.details.items():
            return json.dumps({"Subscribers": notification.subscribers})
    return json.dumps({"Subscribers": []})


def _list_tags(response: BudgetsResponse) -> str:
    return json.dumps({"ResourceTags": []})
