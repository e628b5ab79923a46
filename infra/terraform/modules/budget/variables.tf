variable "name" {
  description = "Name of the deployment. The names of its resources begin with this name."
  type        = string
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,23}$", var.name))
    error_message = "A name has 2 to 24 lower-case letters, digits and hyphens, and begins with a letter."
  }
}

variable "dollars_per_month" {
  description = "Limit for one calendar month, in US dollars."
  type        = number
  validation {
    condition     = var.dollars_per_month >= 1
    error_message = "Write a number of dollars, at least 1."
  }
}

variable "emails" {
  description = "Mail addresses that get the alarm."
  type        = set(string)
  validation {
    condition     = length(var.emails) >= 1 && length(var.emails) <= 10 && alltrue([for mail in var.emails : can(regex("^[^@ ]+@[^@ ]+\\.[^@ ]+$", mail))])
    error_message = "Write 1 to 10 addresses."
  }
}

variable "tag" {
  description = "Tag of the resources whose costs are counted; it must be activated as a cost allocation tag. Null: the whole account."
  type        = object({ key = string, value = string })
  default     = null
  validation {
    condition     = var.tag == null || can(regex("^[A-Za-z0-9:_-]+$", var.tag.key))
    error_message = "Write { key = ..., value = ... }, or null."
  }
}
