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
  description = "Whether `terraform destroy` deletes bucket and database with every run in them. If false, it fails."
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
  description = "Public parameter of Systems Manager that names the image of head and control machine: Amazon Linux 2023."
  type        = string
  default     = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
  validation {
    condition     = startswith(var.image_parameter, "/")
    error_message = "Write the path of a parameter, such as /aws/service/..."
  }
}

variable "gpu_image_parameter" {
  description = "Public parameter of Systems Manager that names the image of GPU machines: Amazon Linux 2023 with NVIDIA's driver."
  type        = string
  default     = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id"
  validation {
    condition     = startswith(var.gpu_image_parameter, "/")
    error_message = "Write the path of a parameter, such as /aws/service/..."
  }
}

variable "head_instance_type" {
  description = "Type of the head. Scheduler and reward actors may run on it."
  type        = string
  default     = "m7i.2xlarge"
  validation {
    condition     = can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", var.head_instance_type))
    error_message = "Write a type such as m7i.2xlarge."
  }
}

variable "control_instance_type" {
  description = "Type of the control machine."
  type        = string
  default     = "m7i.xlarge"
  validation {
    condition     = can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", var.control_instance_type))
    error_message = "Write a type such as m7i.xlarge."
  }
}

variable "rollout" {
  description = "Rollout group, on spot instances: allowed instance types (all with the same number of GPUs), GPUs per machine, smallest and largest number of machines."
  type        = object({ instance_types = list(string), gpus = number, min = number, max = number })
  default     = { instance_types = ["g6e.xlarge", "g6.2xlarge", "g5.2xlarge"], gpus = 1, min = 1, max = 4 }
  validation {
    condition     = length(var.rollout.instance_types) > 0 && alltrue([for type in var.rollout.instance_types : can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", type))])
    error_message = "Write at least one type such as g6e.xlarge."
  }
  validation {
    condition     = var.rollout.gpus >= 1 && var.rollout.min >= 0 && var.rollout.max >= var.rollout.min
    error_message = "A machine has at least one GPU; min is at least 0, and max at least min."
  }
}

variable "train" {
  description = "Train group, on demand: type and number of machines."
  type        = object({ instance_type = string, count = number })
  default     = { instance_type = "g6e.2xlarge", count = 1 }
  validation {
    condition     = can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", var.train.instance_type)) && var.train.count >= 0
    error_message = "Write a type such as g6e.2xlarge, and a number of machines, at least 0."
  }
}

variable "database" {
  description = "Database: class, disk in GiB (it may grow to four times that), and whether a second zone has a standby."
  type        = object({ instance_class = string, disk_gib = number, multi_az = bool })
  default     = { instance_class = "db.t4g.medium", disk_gib = 50, multi_az = false }
  validation {
    condition     = startswith(var.database.instance_class, "db.") && var.database.disk_gib >= 20
    error_message = "Write a class such as db.t4g.medium, and a disk of at least 20."
  }
}

variable "disk_gib" {
  description = "Size of each machine's disk in GiB."
  type        = number
  default     = 200
  validation {
    condition     = var.disk_gib >= 50 && var.disk_gib <= 16384
    error_message = "Write 50 to 16384."
  }
}

variable "ray_token" {
  description = "Your own token for the Ray cluster. Null: a random token. Set it as TF_VAR_ray_token; it is stored only in Secrets Manager."
  type        = string
  default     = null
  sensitive   = true
  ephemeral   = true
  validation {
    condition     = var.ray_token == null || can(regex("^[A-Za-z0-9_-]{16,256}$", var.ray_token))
    error_message = "Write 16 to 256 letters, digits, _ and -."
  }
}

variable "prefect_password" {
  description = "Your own password for Prefect's API. Null: a random password. Set it as TF_VAR_prefect_password; it is stored only in Secrets Manager."
  type        = string
  default     = null
  sensitive   = true
  ephemeral   = true
  validation {
    condition     = var.prefect_password == null || can(regex("^[A-Za-z0-9_-]{16,256}$", var.prefect_password))
    error_message = "Write 16 to 256 letters, digits, _ and -."
  }
}

variable "secrets_version" {
  description = "Version of the secrets. Raise it by one to write every secret again."
  type        = number
  default     = 1
  validation {
    condition     = var.secrets_version >= 1 && floor(var.secrets_version) == var.secrets_version
    error_message = "Write a whole number, at least 1."
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
