# The software of the machines: rollflow's wheel and pinned versions in the bucket, and the script that installs them.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.100, < 6.0" }
  }
}

# The files are named by their content: a new wheel or new pinned versions change the script and replace the machines.
locals {
  wheel = "${var.prefix}/${substr(filesha256(var.wheel), 0, 12)}/${basename(var.wheel)}"
  pins  = "${var.prefix}/${substr(filesha256(var.pins), 0, 12)}/${basename(var.pins)}"
}

resource "aws_s3_object" "wheel" {
  bucket      = var.bucket
  key         = local.wheel
  source      = var.wheel
  source_hash = filesha256(var.wheel)
}

resource "aws_s3_object" "pins" {
  bucket      = var.bucket
  key         = local.pins
  source      = var.pins
  source_hash = filesha256(var.pins)
}
