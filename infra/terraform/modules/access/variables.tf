variable "name" {
  description = "Name of the deployment. The names of its resources begin with this name."
  type        = string
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,23}$", var.name))
    error_message = "A name has 2 to 24 lower-case letters, digits and hyphens, and begins with a letter."
  }
}

variable "bucket_arn" {
  description = "ARN of the bucket that holds the store."
  type        = string
  validation {
    condition     = can(regex("^arn:[a-z-]+:s3:::[a-z0-9-]+$", var.bucket_arn))
    error_message = "Write the ARN of a bucket."
  }
}

variable "store_prefix" {
  description = "Prefix of the store in the bucket."
  type        = string
  default     = "store"
  validation {
    condition     = can(regex("^[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*$", var.store_prefix))
    error_message = "Write a prefix such as team/store, of letters, digits, _ and -, without a slash at its ends."
  }
}

variable "software_prefix" {
  description = "Prefix of rollflow's own files in the bucket."
  type        = string
  default     = "software"
  validation {
    condition     = can(regex("^[A-Za-z0-9_-]+$", var.software_prefix))
    error_message = "Write one word of letters, digits, _ and -."
  }
}

variable "kms_key_arn" {
  description = "KMS key of bucket and secrets. Null: keys that AWS manages."
  type        = string
  default     = null
  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:[a-z-]+:kms:[^:]+:[0-9]{12}:key/[a-zA-Z0-9-]+$", var.kms_key_arn))
    error_message = "Write the ARN of a KMS key, or null."
  }
}

variable "roles" {
  description = "Roles by kind of machine: the secrets that it reads and writes, and whether it publishes metrics."
  type = map(object({
    description = string
    reads       = optional(set(string), [])
    writes      = optional(set(string), [])
    metrics     = optional(bool, false)
  }))
  validation {
    condition     = length(var.roles) > 0 && alltrue([for key, _ in var.roles : can(regex("^[a-z]+$", key))])
    error_message = "Write at least one role; its name has lower-case letters alone."
  }
}

variable "secrets" {
  description = "Secrets by name, with the purpose of each. Each secret gets its value in secret_values, or else a random value."
  type        = map(string)
  default     = {}
  validation {
    condition     = alltrue([for key, _ in var.secrets : can(regex("^[a-z][a-z-]*$", key))])
    error_message = "A secret's name has lower-case letters and hyphens."
  }
}

variable "secrets_made_later" {
  description = "Secrets whose value a machine creates at its first start, by name, with the purpose of each."
  type        = map(string)
  default     = {}
  validation {
    condition     = alltrue([for key, _ in var.secrets_made_later : can(regex("^[a-z][a-z-]*$", key))])
    error_message = "A secret's name has lower-case letters and hyphens."
  }
}

variable "secret_values" {
  description = "Your own values for some of the secrets. The values are stored only in Secrets Manager."
  type        = map(string)
  default     = {}
  sensitive   = true
  ephemeral   = true
  validation {
    condition     = alltrue([for value in values(var.secret_values) : length(value) >= 16])
    error_message = "A secret's value has at least 16 characters."
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

variable "secret_recovery_days" {
  description = "Days for which a destroyed secret can be restored. Its name cannot be used during these days. 0: no days."
  type        = number
  default     = 0
  validation {
    condition     = var.secret_recovery_days == 0 || (var.secret_recovery_days >= 7 && var.secret_recovery_days <= 30)
    error_message = "Write 0, or 7 to 30."
  }
}
