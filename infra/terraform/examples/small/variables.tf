variable "name" {
  description = "Name of the deployment. Every resource has the tag rollflow = NAME, and most names of resources begin with NAME."
  type        = string
  default     = "rollflow"
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,23}$", var.name))
    error_message = "A name has 2 to 24 lower-case letters, digits and hyphens, and begins with a letter."
  }
}

variable "region" {
  description = "AWS region."
  type        = string
  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "Write a region such as eu-central-1."
  }
}

variable "cidr" {
  description = "Addresses of the VPC."
  type        = string
  default     = "10.42.0.0/16"
  validation {
    condition     = can(cidrhost(var.cidr, 0))
    error_message = "Write a block of addresses, such as 10.42.0.0/16."
  }
}

variable "bucket" {
  description = "Name of the bucket to create, unique in all of AWS."
  type        = string
  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "A bucket's name has 3 to 63 lower-case letters, digits and hyphens."
  }
}

variable "keep_pruned_days" {
  description = "Days for which an object stays recoverable after rollflow has pruned or replaced it."
  type        = number
  default     = 14
  validation {
    condition     = var.keep_pruned_days >= 1
    error_message = "Write a whole number of days, at least 1."
  }
}

variable "delete_runs_on_destroy" {
  description = "Whether `terraform destroy` deletes the bucket with every run in it. If false, it fails while the bucket has runs."
  type        = bool
  default     = false
  validation {
    condition     = var.delete_runs_on_destroy != null
    error_message = "Write true or false."
  }
}

variable "kms_key_arn" {
  description = "Your own KMS key for bucket, disks and secrets. Null: keys that AWS manages."
  type        = string
  default     = null
  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:[a-z-]+:kms:[^:]+:[0-9]{12}:key/[a-zA-Z0-9-]+$", var.kms_key_arn))
    error_message = "Write the ARN of a KMS key, or null."
  }
}

variable "wheel" {
  description = "rollflow's wheel, a local file: pip wheel --no-deps --wheel-dir dist ."
  type        = string
  validation {
    condition     = endswith(var.wheel, ".whl")
    error_message = "Write the path of a wheel (.whl)."
  }
}

variable "pins" {
  description = "Pinned versions that machines install, a local file in pip's format, such as infra/constraints-cpu.txt."
  type        = string
  validation {
    condition     = endswith(var.pins, ".txt")
    error_message = "Write the path of a file of pins (.txt)."
  }
}

variable "image_parameter" {
  description = "Public parameter of Systems Manager that names the machine image: Amazon Linux 2023 with NVIDIA's driver."
  type        = string
  default     = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id"
  validation {
    condition     = startswith(var.image_parameter, "/")
    error_message = "Write the path of a parameter, such as /aws/service/..."
  }
}

variable "instance_type" {
  description = "Type of the GPU machine."
  type        = string
  default     = "g6.xlarge"
  validation {
    condition     = can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", var.instance_type))
    error_message = "Write a type such as g6.xlarge."
  }
}

variable "disk_gib" {
  description = "Size of the machine's disk in GiB."
  type        = number
  default     = 200
  validation {
    condition     = var.disk_gib >= 50 && var.disk_gib <= 16384
    error_message = "Write 50 to 16384."
  }
}

variable "dollars_per_month" {
  description = "Budget of the account for a calendar month, in US dollars. AWS sends mail at 80%, at 100%, and by its forecast."
  type        = number
  validation {
    condition     = var.dollars_per_month >= 1
    error_message = "Write a number of dollars, at least 1."
  }
}

variable "emails" {
  description = "Mail addresses that get the budget's alarm."
  type        = set(string)
  validation {
    condition     = length(var.emails) >= 1 && length(var.emails) <= 10
    error_message = "Write 1 to 10 addresses."
  }
}
