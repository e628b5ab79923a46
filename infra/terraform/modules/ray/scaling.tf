# The head reports every minute how many GPUs actors wait for, and how many are in use (gpu_demand.py). The rollout
# group grows by the number of GPUs that actors wait for. The group shrinks only when no GPU was in use for a quarter of
# an hour, because AWS chooses the machine that is removed, and must not remove a busy engine.

resource "aws_autoscaling_policy" "grow" {
  name                      = "${var.name}-grow"
  autoscaling_group_name    = aws_autoscaling_group.rollout.name
  policy_type               = "StepScaling"
  adjustment_type           = "ChangeInCapacity"
  estimated_instance_warmup = 600

  step_adjustment {
    metric_interval_lower_bound = 0
    metric_interval_upper_bound = var.rollout.gpus
    scaling_adjustment          = 1
  }
  step_adjustment {
    metric_interval_lower_bound = var.rollout.gpus
    metric_interval_upper_bound = 3 * var.rollout.gpus
    scaling_adjustment          = 2
  }
  step_adjustment {
    metric_interval_lower_bound = 3 * var.rollout.gpus
    scaling_adjustment          = 4
  }
}

resource "aws_autoscaling_policy" "shrink" {
  name                   = "${var.name}-shrink"
  autoscaling_group_name = aws_autoscaling_group.rollout.name
  policy_type            = "StepScaling"
  adjustment_type        = "ExactCapacity"

  step_adjustment {
    metric_interval_upper_bound = 0
    scaling_adjustment          = var.rollout.min
  }
}

resource "aws_cloudwatch_metric_alarm" "waiting" {
  alarm_name          = "${var.name}-gpus-waiting"
  alarm_description   = "Actors wait for a GPU"
  namespace           = "rollflow/${var.name}"
  metric_name         = "GpusWaiting"
  statistic           = "Minimum"
  period              = 60
  evaluation_periods  = 2
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0
  treat_missing_data  = "notBreaching"
  alarm_actions       = [aws_autoscaling_policy.grow.arn]
}

resource "aws_cloudwatch_metric_alarm" "unused" {
  alarm_name          = "${var.name}-gpus-unused"
  alarm_description   = "No GPU is in use, and nobody waits for one"
  namespace           = "rollflow/${var.name}"
  metric_name         = "GpusWanted"
  statistic           = "Maximum"
  period              = 60
  evaluation_periods  = 15
  comparison_operator = "LessThanOrEqualToThreshold"
  threshold           = 0
  treat_missing_data  = "notBreaching"
  alarm_actions       = [aws_autoscaling_policy.shrink.arn]
}
