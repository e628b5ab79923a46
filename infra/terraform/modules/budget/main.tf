# A budget that sends mail when the costs of a month reach 80% or 100% of the limit, and when AWS forecasts that they
# will exceed the limit. A budget stops nothing.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.100, < 6.0" }
  }
}

resource "aws_budgets_budget" "month" {
  name         = "${var.name}-month"
  budget_type  = "COST"
  limit_amount = format("%.1f", var.dollars_per_month)
  limit_unit   = "USD"
  time_unit    = "MONTHLY"

  # Only the costs of resources with the deployment's tag, once the tag is activated for billing; see the variable.
  dynamic "cost_filter" {
    for_each = var.tag == null ? [] : [var.tag]
    content {
      name   = "TagKeyValue"
      values = [format("user:%s$%s", cost_filter.value.key, cost_filter.value.value)]
    }
  }

  dynamic "notification" {
    for_each = { actual80 = ["ACTUAL", 80], actual100 = ["ACTUAL", 100], forecast = ["FORECASTED", 100] }
    content {
      notification_type          = notification.value[0]
      threshold                  = notification.value[1]
      threshold_type             = "PERCENTAGE"
      comparison_operator        = "GREATER_THAN"
      subscriber_email_addresses = var.emails
    }
  }
}
