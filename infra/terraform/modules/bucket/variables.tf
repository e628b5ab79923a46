variable "name" {
  description = "Name of the bucket, unique in all of AWS."
  type        = string
  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.name))
    error_message = "A bucket's name has 3 to 63 lower-case letters, digits and hyphens."
  }
}

variable "kms_key_arn" {
  description = "KMS key that encrypts the objects. Null: keys that S3 manages (AES256)."
  type        = string
  default     = null
  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:[a-z-]+:kms:[^:]+:[0-9]{12}:key/[a-zA-Z0-9-]+$", var.kms_key_arn))
    error_message = "Write the ARN of a KMS key, or null."
  }
}

variable "keep_pruned_days" {
  description = "Days for which an object stays recoverable after rollflow has pruned or replaced it."
  type        = number
  default     = 14
  validation {
    condition     = var.keep_pruned_days >= 1 && floor(var.keep_pruned_days) == var.keep_pruned_days
    error_message = "Write a whole number of days, at least 1."
  }
}

variable "abort_uploads_days" {
  description = "Days after which an unfinished upload is aborted. After 7 days, rollflow assumes that its writer is dead."
  type        = number
  default     = 7
  validation {
    condition     = var.abort_uploads_days >= 7 && floor(var.abort_uploads_days) == var.abort_uploads_days
    error_message = "Write a whole number of days, at least 7: until then the writer may be alive."
  }
}

variable "force_destroy" {
  description = "Whether `terraform destroy` deletes the bucket with every run in it."
  type        = bool
  default     = false
  validation {
    condition     = var.force_destroy != null
    error_message = "Write true or false."
  }
}
