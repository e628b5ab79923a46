variable "name" {
  description = "Name of the machine."
  type        = string
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,40}$", var.name))
    error_message = "A name has 2 to 41 lower-case letters, digits and hyphens, and begins with a letter."
  }
}

variable "image_id" {
  description = "Machine image: Amazon Linux 2023, with NVIDIA's driver on machines with GPUs."
  type        = string
  validation {
    condition     = can(regex("^ami-[0-9a-f]+$", var.image_id))
    error_message = "Write ami-..."
  }
}

variable "instance_type" {
  description = "Type of the machine."
  type        = string
  validation {
    condition     = can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", var.instance_type))
    error_message = "Write a type such as g6.xlarge."
  }
}

variable "disk_gib" {
  description = "Size of the disk in GiB, for software, one policy and the policy versions in use."
  type        = number
  default     = 200
  validation {
    condition     = var.disk_gib >= 50 && var.disk_gib <= 16384
    error_message = "Write 50 to 16384."
  }
}

variable "kms_key_arn" {
  description = "KMS key that encrypts the disk. Null: the account's default key for disks."
  type        = string
  default     = null
  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:[a-z-]+:kms:[^:]+:[0-9]{12}:key/[a-zA-Z0-9-]+$", var.kms_key_arn))
    error_message = "Write the ARN of a KMS key, or null."
  }
}

variable "profile" {
  description = "Instance profile, which defines what the machine may do."
  type        = string
  validation {
    condition     = length(var.profile) > 0
    error_message = "Write the name of an instance profile."
  }
}

variable "security_group_ids" {
  description = "Security groups of the machine."
  type        = list(string)
  validation {
    condition     = length(var.security_group_ids) > 0
    error_message = "Write at least one; without one the machine would get the default group."
  }
}

variable "subnet_id" {
  description = "Private subnet of the machine."
  type        = string
  validation {
    condition     = startswith(var.subnet_id, "subnet-")
    error_message = "Write the id of a subnet."
  }
}

variable "private_ip" {
  description = "Address of the machine in its subnet. Null: any free address."
  type        = string
  default     = null
  validation {
    condition     = var.private_ip == null || can(cidrhost("${var.private_ip}/32", 0))
    error_message = "Write an IPv4 address, or null."
  }
}

variable "user_data" {
  description = "Shell script of the machine's first start. It must contain no secret: all users of the machine can read it."
  type        = string
  validation {
    condition     = startswith(var.user_data, "#!/bin/bash") && length(base64gzip(var.user_data)) <= 21848
    error_message = "User data begins with #!/bin/bash, and has at most 16 KiB when it is compressed."
  }
}
