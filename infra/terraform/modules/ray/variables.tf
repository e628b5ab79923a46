variable "name" {
  description = "Name of the deployment. The names of its resources begin with this name."
  type        = string
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,23}$", var.name))
    error_message = "A name has 2 to 24 lower-case letters, digits and hyphens, and begins with a letter."
  }
}

variable "head_image_id" {
  description = "Machine image of the head: Amazon Linux 2023."
  type        = string
  validation {
    condition     = can(regex("^ami-[0-9a-f]+$", var.head_image_id))
    error_message = "Write ami-..."
  }
}

variable "image_id" {
  description = "Machine image of the groups: Amazon Linux 2023 with NVIDIA's driver."
  type        = string
  validation {
    condition     = can(regex("^ami-[0-9a-f]+$", var.image_id))
    error_message = "Write ami-..."
  }
}

variable "subnets" {
  description = "Private subnets: id and addresses. The head and the train group are in the first."
  type        = list(object({ id = string, cidr = string }))
  validation {
    condition     = length(var.subnets) > 0
    error_message = "Write at least one subnet."
  }
}

variable "head_ip" {
  description = "Address of the head in the first subnet. It stays when the head is replaced."
  type        = string
  validation {
    condition     = can(cidrhost("${var.head_ip}/32", 0))
    error_message = "Write an IPv4 address."
  }
}

variable "members_security_group_id" {
  description = "Security group whose members reach each other."
  type        = string
  validation {
    condition     = startswith(var.members_security_group_id, "sg-")
    error_message = "Write the id of a security group."
  }
}

variable "profiles" {
  description = "Instance profiles of the head and of the other nodes."
  type        = object({ head = string, node = string })
  validation {
    condition     = length(var.profiles.head) > 0 && length(var.profiles.node) > 0
    error_message = "Write the names of two instance profiles."
  }
}

variable "install_script" {
  description = "Script that installs rollflow, the first part of every machine's user data."
  type        = string
  validation {
    condition     = startswith(var.install_script, "#!/bin/bash")
    error_message = "It begins with #!/bin/bash."
  }
}

variable "variables" {
  description = "Environment variables of Ray and its processes. They must not be secrets: all users of a machine can read them."
  type        = map(string)
  validation {
    condition     = alltrue([for name, value in var.variables : can(regex("^[A-Za-z_]+$", name)) && can(regex("^[^\\s\"'$`\\\\]*$", value))])
    error_message = "A name has letters and _; a value has no space, quote, $ or backslash."
  }
}

variable "token_secret" {
  description = "Name of the secret that holds the cluster's token."
  type        = string
  validation {
    condition     = can(regex("^[A-Za-z0-9/_+=.@-]+$", var.token_secret))
    error_message = "Write the name of a secret."
  }
}

variable "authority_secret" {
  description = "Name of the secret with the key and the certificate of the cluster's authority. The first head creates them."
  type        = string
  validation {
    condition     = can(regex("^[A-Za-z0-9/_+=.@-]+$", var.authority_secret))
    error_message = "Write the name of a secret."
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

variable "disk_gib" {
  description = "Size of each machine's disk in GiB."
  type        = number
  default     = 200
  validation {
    condition     = var.disk_gib >= 50 && var.disk_gib <= 16384
    error_message = "Write 50 to 16384."
  }
}

variable "kms_key_arn" {
  description = "KMS key that encrypts the disks. Null: the account's default key for disks."
  type        = string
  default     = null
  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:[a-z-]+:kms:[^:]+:[0-9]{12}:key/[a-zA-Z0-9-]+$", var.kms_key_arn))
    error_message = "Write the ARN of a KMS key, or null."
  }
}
