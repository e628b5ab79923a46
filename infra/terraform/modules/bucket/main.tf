# The bucket of a store: private, encrypted, versioned. rollflow commits with conditional puts (If-None-Match), and no
# statement here forbids them.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.100, < 6.0" }
  }
}

data "aws_partition" "here" {}

locals {
  arn = "arn:${data.aws_partition.here.partition}:s3:::${var.name}" # known before the bucket exists
}

resource "aws_s3_bucket" "store" {
  bucket        = var.name
  force_destroy = var.force_destroy
}

resource "aws_s3_bucket_versioning" "store" {
  bucket = aws_s3_bucket.store.id
  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "store" {
  bucket = aws_s3_bucket.store.id
  rule {
    bucket_key_enabled = var.kms_key_arn != null
    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_arn
    }
  }
}

resource "aws_s3_bucket_public_access_block" "store" {
  bucket                  = aws_s3_bucket.store.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "store" {
  bucket = aws_s3_bucket.store.id
  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_policy" "store" {
  bucket     = aws_s3_bucket.store.id
  policy     = data.aws_iam_policy_document.store.json
  depends_on = [aws_s3_bucket_public_access_block.store]
}

data "aws_iam_policy_document" "store" {
  statement {
    sid       = "OnlyTLS"
    effect    = "Deny"
    actions   = ["s3:*"]                      # wildcard: denies every action without TLS
    resources = [local.arn, "${local.arn}/*"] # wildcard: the denial applies to every object
    principals {
      type        = "*"
      identifiers = ["*"] # wildcard: the denial applies to everybody
    }
    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "store" {
  bucket     = aws_s3_bucket.store.id
  depends_on = [aws_s3_bucket_versioning.store]

  rule {
    id     = "stale-uploads"
    status = "Enabled"
    filter {}
    abort_incomplete_multipart_upload {
      days_after_initiation = var.abort_uploads_days
    }
  }

  rule {
    id     = "pruned-versions"
    status = "Enabled"
    filter {}
    noncurrent_version_expiration {
      noncurrent_days = var.keep_pruned_days
    }
    expiration {
      expired_object_delete_marker = true
    }
  }
}
