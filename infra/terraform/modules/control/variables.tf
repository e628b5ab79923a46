variable "name" {
  description = "Name of the deployment. The names of its resources begin with this name."
  type        = string
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,23}$", var.name))
    error_message = "A name has 2 to 24 lower-case letters, digits and hyphens, and begins with a letter."
  }
}

variable "vpc_id" {
  description = "The VPC."
  type        = string
  validation {
    condition     = startswith(var.vpc_id, "vpc-")
    error_message = "Write the id of a VPC."
  }
}

variable "subnets" {
  description = "Private subnets: id and addresses. The machine is in the first; the database needs two, in two zones."
  type        = list(object({ id = string, cidr = string }))
  validation {
    condition     = length(var.subnets) >= 2
    error_message = "Write at least two subnets."
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

variable "image_id" {
  description = "Machine image: Amazon Linux 2023."
  type        = string
  validation {
    condition     = can(regex("^ami-[0-9a-f]+$", var.image_id))
    error_message = "Write ami-..."
  }
}

variable "instance_type" {
  description = "Type of the control machine."
  type        = string
  default     = "m7i.xlarge"
  validation {
    condition     = can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", var.instance_type))
    error_message = "Write a type such as m7i.xlarge."
  }
}

variable "role" {
  description = "Role of the control machine. It gets the right to read the database's password."
  type        = string
  validation {
    condition     = length(var.role) > 0
    error_message = "Write the name of a role."
  }
}

variable "profile" {
  description = "Instance profile of that role."
  type        = string
  validation {
    condition     = length(var.profile) > 0
    error_message = "Write the name of an instance profile."
  }
}

variable "driver_script" {
  description = "Script that installs rollflow and joins the Ray cluster, the first part of the user data."
  type        = string
  validation {
    condition     = startswith(var.driver_script, "#!/bin/bash")
    error_message = "It begins with #!/bin/bash."
  }
}

variable "prefect_secret" {
  description = "Name of the secret that holds the password of Prefect's API."
  type        = string
  validation {
    condition     = can(regex("^[A-Za-z0-9/_+=.@-]+$", var.prefect_secret))
    error_message = "Write the name of a secret."
  }
}

variable "store_uri" {
  description = "Address of the store. MLflow stores its files in it, beside the runs."
  type        = string
  validation {
    condition     = can(regex("^s3://[a-z0-9-]+/[A-Za-z0-9_/-]+$", var.store_uri))
    error_message = "Write s3://bucket/prefix."
  }
}

variable "settings" {
  description = "Settings file of rollflow, which the machine gets as /etc/rollflow/settings.toml."
  type        = string
  validation {
    condition     = strcontains(var.settings, "[variables]")
    error_message = "It is a TOML file with a section [variables]."
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

variable "delete_runs_on_destroy" {
  description = "Whether `terraform destroy` deletes the database without a last snapshot. If false, `terraform destroy` fails."
  type        = bool
  default     = false
  validation {
    condition     = var.delete_runs_on_destroy != null
    error_message = "Write true or false."
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

variable "kms_key_arn" {
  description = "KMS key that encrypts disk and database. Null: the account's default key for each."
  type        = string
  default     = null
  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:[a-z-]+:kms:[^:]+:[0-9]{12}:key/[a-zA-Z0-9-]+$", var.kms_key_arn))
    error_message = "Write the ARN of a KMS key, or null."
  }
}
