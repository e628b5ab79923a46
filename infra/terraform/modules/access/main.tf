# Permissions: one role for each kind of machine, with the rights that this kind needs, and the secrets that the roles
# read. Terraform's state, plan and user data contain no secret: values are write-only; machines fetch them at start.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.100, < 6.0" }
  }
}

ephemeral "aws_secretsmanager_random_password" "generated" {
  for_each            = var.secrets
  password_length     = 48
  exclude_punctuation = true
}

resource "aws_secretsmanager_secret" "this" {
  for_each                = var.secrets
  name                    = "${var.name}/${each.key}"
  description             = each.value
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = var.secret_recovery_days
}

# A random value for each secret that the user does not set. Raise `secrets_version` by 1 to write all of them again.
resource "aws_secretsmanager_secret_version" "this" {
  for_each                 = var.secrets
  secret_id                = aws_secretsmanager_secret.this[each.key].id
  secret_string_wo         = lookup(var.secret_values, each.key, ephemeral.aws_secretsmanager_random_password.generated[each.key].random_password)
  secret_string_wo_version = var.secrets_version
}

# A machine creates the values of these secrets at its first start, so they have no value yet.
resource "aws_secretsmanager_secret" "made_later" {
  for_each                = var.secrets_made_later
  name                    = "${var.name}/${each.key}"
  description             = each.value
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = var.secret_recovery_days
}

locals {
  secret_arns = merge(
    { for key, secret in aws_secretsmanager_secret.this : key => secret.arn },
    { for key, secret in aws_secretsmanager_secret.made_later : key => secret.arn },
  )
}

resource "aws_iam_role" "machine" {
  for_each           = var.roles
  name               = "${var.name}-${each.key}"
  description        = each.value.description
  assume_role_policy = data.aws_iam_policy_document.ec2.json
}

resource "aws_iam_instance_profile" "machine" {
  for_each = var.roles
  name     = "${var.name}-${each.key}"
  role     = aws_iam_role.machine[each.key].name
}

resource "aws_iam_role_policy" "machine" {
  for_each = var.roles
  name     = "${var.name}-${each.key}"
  role     = aws_iam_role.machine[each.key].id
  policy   = data.aws_iam_policy_document.machine[each.key].json
}

data "aws_iam_policy_document" "ec2" {
  statement {
    sid     = "MachinesOfThisAccount"
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "machine" {
  for_each = var.roles

  statement {
    sid       = "ListStore"
    actions   = ["s3:GetBucketLocation", "s3:ListBucket", "s3:ListBucketMultipartUploads"]
    resources = [var.bucket_arn]
  }

  # No role may read or delete old versions of objects, so whoever steals a role cannot destroy a run permanently.
  statement {
    sid       = "UseStore"
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
    resources = ["${var.bucket_arn}/${var.store_prefix}/*"] # wildcard: only the objects of the store
  }

  statement {
    sid       = "ReadSoftware"
    actions   = ["s3:GetObject"]
    resources = ["${var.bucket_arn}/${var.software_prefix}/*"] # wildcard: only the files of rollflow itself
  }

  # The rights that Session Manager's agent needs. Amazon's own policy allows more (every parameter of the account).
  statement {
    sid = "SessionManager"
    actions = [
      "ssm:UpdateInstanceInformation",
      "ssmmessages:CreateControlChannel", "ssmmessages:CreateDataChannel",
      "ssmmessages:OpenControlChannel", "ssmmessages:OpenDataChannel",
    ]
    resources = ["*"] # wildcard: these actions cannot be limited to a resource
  }

  dynamic "statement" {
    for_each = length(each.value.reads) > 0 ? [1] : []
    content {
      sid       = "ReadSecrets"
      actions   = ["secretsmanager:GetSecretValue"]
      resources = [for key in each.value.reads : local.secret_arns[key]]
    }
  }

  dynamic "statement" {
    for_each = length(each.value.writes) > 0 ? [1] : []
    content {
      sid       = "WriteSecrets"
      actions   = ["secretsmanager:PutSecretValue"]
      resources = [for key in each.value.writes : local.secret_arns[key]]
    }
  }

  dynamic "statement" {
    for_each = var.kms_key_arn == null ? [] : [1]
    content {
      sid       = "UseKey"
      actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
      resources = [var.kms_key_arn]
    }
  }

  dynamic "statement" {
    for_each = each.value.metrics ? [1] : []
    content {
      sid       = "PublishMetrics"
      actions   = ["cloudwatch:PutMetricData"]
      resources = ["*"] # wildcard: the action cannot be limited to a resource; the condition allows only one namespace
      condition {
        test     = "StringEquals"
        variable = "cloudwatch:namespace"
        values   = ["rollflow/${var.name}"]
      }
    }
  }
}
